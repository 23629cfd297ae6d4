"""`policy: sync`: no step beyond a checkpoint before its evaluation, on real Kafka and S3."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from megaflow_stream.observe.scan import scan
from megaflow_stream.observe.status import read_status
from megaflow_stream.training import gate
from megaflow_stream.training.job import Job
from tests.training_job import ThreadGroup, TrainingJob, final, trained

torch = pytest.importorskip("torch")


@pytest.fixture
def job(kafka: str, s3: Any, tmp_path: Path) -> TrainingJob:
    found = TrainingJob(kafka, s3, tmp_path)
    asyncio.run(found.topics())
    asyncio.run(found.write(96))  # 12 steps, a checkpoint every 5
    return found


@pytest.fixture
def gated(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(gate, "LOOK_SECONDS", 0.1)
    return job.with_(gates=("judge",))


def say(job: TrainingJob, manifest: str, evaluation: str = "judge") -> None:
    async def send() -> None:
        bus = await job.bus()
        producer = await bus.producer()
        value = orjson.dumps({"job": job.name, "evaluation": evaluation, "manifest": manifest})
        await (await producer.send("evaluations", value, key=job.name.encode(), partition=0))
        await producer.close()
        await bus.close()

    asyncio.run(send())


async def status(job: TrainingJob) -> dict[str, Any]:
    bus = await job.bus()
    found = await read_status(bus)
    await bus.close()
    return found[f"trainer/{job.name}"]


def steps(group: ThreadGroup) -> list[int]:
    return [e["step"] for e in group.named("step")]


def waits(step: int, *, away: bool = False) -> str:
    what = f"the evaluation of step {step}"
    return f"{what}; no evaluator runs: start it with `megaflow evaluate judge`" if away else what


def test_the_next_interval_waits_for_the_evaluation(job: TrainingJob, gated: Job) -> None:
    group = ThreadGroup(gated, 2)
    group.wait("waiting", waiting_for=waits(5, away=True))
    assert steps(group) == [1, 2, 3, 4, 5]
    document = asyncio.run(_until_waiting(job))
    assert document["waiting_for"].startswith(waits(5))
    manifest = asyncio.run(announced(job, 5))
    say(job, manifest, "another")
    say(job, "jobs/another/manifests/000000000005-00000000.json")
    say(job, manifest)
    group.wait("waiting", waiting_for=waits(10, away=True))
    assert steps(group) == list(range(1, 11))
    say(job, asyncio.run(announced(job, 10)))
    group.wait("step", step=12)
    group.stop.asked = True
    assert final(group.join())["step"] == 12
    assert len(asyncio.run(trained(job))) == 2 * 96


def test_a_restart_waits_for_the_head_and_a_stop_does_not_wait(job: TrainingJob, gated: Job) -> None:
    group = ThreadGroup(gated, 1)
    group.wait("waiting", waiting_for=waits(5))
    group.stop.asked = True
    assert final(group.join())["step"] == 5
    again = ThreadGroup(gated, 2, generation=2)
    again.wait("waiting", waiting_for=waits(5, away=True))
    assert again.named("step") == []
    say(job, asyncio.run(announced(job, 5)))
    again.wait("step", step=10)
    again.stop.asked = True
    again.join()
    assert steps(again)[:5] == [6, 7, 8, 9, 10]


def test_async_waits_for_nobody(job: TrainingJob) -> None:
    group = ThreadGroup(job.job, 1)
    group.wait("step", step=12)
    group.stop.asked = True
    assert [e for e in group.join() if e["event"] == "waiting"] == []


async def announced(job: TrainingJob, step: int) -> str:
    """The manifest on `checkpoints`."""
    bus = await job.bus()
    found = [orjson.loads(r.value or b"") async for r in scan(bus, "checkpoints") if r.key == job.name.encode()]
    await bus.close()
    return str(next(f["manifest"] for f in found if f["step"] == step))


async def _until_waiting(job: TrainingJob) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while (found := await status(job))["state"] != "waiting":
            await asyncio.sleep(0.1)
    return found
