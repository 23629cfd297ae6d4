"""Lineage on a real S3: from a checkpoint to what made it, and back from a conversation."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import pytest

from megaflow_stream import checkpoint
from megaflow_stream.checkpoint import CheckpointWriter, Head, Snapshot, TensorSpec, lineage, names
from megaflow_stream.errors import Damaged
from megaflow_stream.storage.s3 import S3Store

SMALL = [(TensorSpec("w", "float32", (4,), "trainable"), memoryview(bytearray(16)))]


@pytest.fixture
async def store(s3: Any) -> AsyncIterator[S3Store]:
    store = S3Store(
        endpoint_url=s3.endpoint_url, bucket="test-storage", access_key=s3.access_key, secret_key=s3.secret_key
    )
    await store.open()
    yield store
    await store.close()


def rows(*found: tuple[str, int, int, int]) -> pa.Table:
    return pa.table(
        {
            "conversation": [c for c, _, _, _ in found],
            "topic": ["features.agent"] * len(found),
            "partition": [p for _, p, _, _ in found],
            "offset": [o for _, _, o, _ in found],
            "step": [s for _, _, _, s in found],
        }
    )


async def save(store: S3Store, job: str, step: int, parent: Head | None, table: pa.Table | None) -> Head:
    state = {"offsets": {"features.agent/0": step}}
    return await CheckpointWriter(store, job).save(
        Snapshot(step=step, tensors=SMALL, state=state, lineage=table), parent
    )


async def test_lineage_walks_the_chain_both_ways(store: S3Store) -> None:
    job = f"job-{secrets.token_hex(6)}"
    head = await save(store, job, 0, None, None)
    head = await save(store, job, 2, head, rows(("a", 0, 0, 1), ("b", 0, 0, 1), ("c", 1, 5, 2)))
    middle = head
    head = await save(store, job, 4, head, rows(("a", 1, 7, 3), ("d", 0, 3, 4)))
    newest = await checkpoint.read_manifest(store, head.ref)
    table = await lineage.of_checkpoint(store, newest)
    assert table.schema == lineage.SCHEMA
    assert table["conversation"].to_pylist() == ["a", "b", "c", "a", "d"]
    older = await checkpoint.read_manifest(store, middle.ref)
    assert (await lineage.of_checkpoint(store, older))["conversation"].to_pylist() == ["a", "b", "c"]
    assert await lineage.of_conversation(store, newest, "a") == [
        lineage.Trained("features.agent", 0, 0, 1, 2),
        lineage.Trained("features.agent", 1, 7, 3, 4),
    ]
    assert await lineage.of_conversation(store, newest, "z") == []


async def test_a_branch_that_was_given_up_is_not_in_the_lineage(store: S3Store) -> None:
    job = f"job-{secrets.token_hex(6)}"
    first = await save(store, job, 1, None, rows(("a", 0, 0, 1)))
    second = await save(store, job, 2, first, rows(("b", 0, 1, 2)))
    await store.delete(second.manifest)  # damaged: the trainer falls back, and trains the step again
    loaded = await checkpoint.load(store, job)
    assert [skipped.step for skipped in loaded.skipped] == [2]
    again = await save(store, job, 2, loaded.head, rows(("b", 0, 1, 2)))
    table = await lineage.of_checkpoint(store, await checkpoint.read_manifest(store, again.ref))
    assert table["conversation"].to_pylist() == ["a", "b"]


async def test_a_job_that_begins_anew_over_an_old_head_has_a_lineage_of_its_own(store: S3Store) -> None:
    job = f"job-{secrets.token_hex(6)}"
    first = await save(store, job, 9, None, rows(("a", 0, 0, 1)))
    state = {"offsets": {"features.agent/0": 1}}
    snapshot = Snapshot(step=1, tensors=SMALL, state=state, lineage=rows(("a", 0, 0, 1)), fresh=True)
    again = await CheckpointWriter(store, job).save(snapshot, first)
    table = await lineage.of_checkpoint(store, await checkpoint.read_manifest(store, again.ref))
    assert table["conversation"].to_pylist() == ["a"]


async def test_a_broken_chain_is_told(store: S3Store) -> None:
    job = f"job-{secrets.token_hex(6)}"
    first = await save(store, job, 1, None, rows(("a", 0, 0, 1)))
    second = await save(store, job, 2, first, rows(("b", 0, 1, 2)))
    old = await checkpoint.read_manifest(store, first.ref)
    new = await checkpoint.read_manifest(store, second.ref)
    await store.put(names.lineage(job, old.lineage.sha256), b"other")
    with pytest.raises(Damaged, match="hash"):
        await lineage.of_checkpoint(store, new)
    await store.delete(names.lineage(job, old.lineage.sha256))
    with pytest.raises(Damaged, match="missing"):
        await lineage.of_checkpoint(store, new)
    assert (await checkpoint.prune(store, job, 2, grace_seconds=-1)).lineage == []
