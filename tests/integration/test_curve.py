"""The loss curve and the totals of a run, on a real S3, where the first checkpoints were pruned meanwhile."""

from __future__ import annotations

import secrets
from typing import Any

from megaflow_stream.checkpoint import CheckpointWriter, Snapshot
from megaflow_stream.runtime.curve import Step, Totals, steps, totals
from megaflow_stream.storage.s3 import S3Store


async def test_a_curve_and_its_totals_outlive_the_pruning_of_manifests(s3: Any) -> None:
    job = f"job-{secrets.token_hex(6)}"
    store = S3Store(
        endpoint_url=s3.endpoint_url, bucket="test-storage", access_key=s3.access_key, secret_key=s3.secret_key
    )
    await store.open()
    assert await totals(store, job) == Totals()
    writer, head, manifests = CheckpointWriter(store, job, definition={}), None, []
    for last in (2, 4, 6):
        state = {
            "offsets": {"features.agent/0": last},
            "steps": [[step, 10.0 - step, 100, 0.5] for step in (last - 1, last)],
            "totals": {"seen_tokens": 100 * last, "first_loss": 9.0},
        }
        head = await writer.save(Snapshot(step=last, tensors=[], state=state), head)
        manifests.append(head.manifest)
    made = [Step(step, 10.0 - step, 100, 0.5) for step in range(1, 7)]
    announced = [(2, 8.5), (4, 6.5), (6, 4.5)]
    assert await steps(store, job, 0, announced) == made
    assert await steps(store, job, 4, announced) == made[4:]
    await store.delete(manifests[0])
    assert await steps(store, job, 0, announced) == [Step(2, 8.5, 0, 0.0), *made[2:]]
    assert await steps(store, job, 3, announced) == made[3:]
    assert await totals(store, job) == Totals(6, 600, 9.0)
    await store.close()
