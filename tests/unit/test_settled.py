"""When nothing is left to do: from end offsets that hold also while the broker still writes a transaction's markers."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.definitions.processor import Processor, Result
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.runtime.settled import Settled
from megaflow_stream.testing import MemoryCluster, create_topics, drive


def processor() -> Processor:
    return Processor(name="nothing", source="in", build=lambda: lambda batch: Result(), sinks=[])


def trainer() -> Trainer:
    def never(*ignored: object) -> None:
        raise AssertionError("nothing is trained here")

    return Trainer(
        name="it",
        data="features",
        validation="features.validation",
        tokenizer="tokenizer.json",
        build_model=never,
        loss=never,  # type: ignore[arg-type]
        build_optimizer=never,
        max_steps=10,
    )


async def publish(cluster: MemoryCluster) -> None:
    """One transaction, committed; its markers come later."""
    producer = await cluster.bus().producer("publisher")
    cluster.inject.late_markers("publisher")
    await producer.begin()
    sent = [await producer.send("in", b"x", partition=number % 2) for number in range(10)]
    await producer.commit(sent)


async def test_what_was_just_published_is_not_overlooked() -> None:
    cluster = MemoryCluster({"in": 2})
    create_topics(cluster, processor())
    await publish(cluster)
    assert cluster.records("in") == []  # nobody can read them yet
    settled = Settled(cluster.bus(), [processor()], [], [])
    assert not await settled.now()
    waiting = asyncio.create_task(settled.wait())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    cluster.write_markers("publisher")
    await drive(cluster, processor(), until=waiting.done)
    await waiting
    assert cluster.committed(processor().group) == {TopicPartition("in", n): 6 for n in range(2)}
    assert await settled.now()


@pytest.mark.parametrize(("step", "evaluations", "settled"), [(9, "ab", False), (10, "a", False), (10, "ab", True)])
async def test_a_job_at_its_last_step_is_done_when_every_evaluation_has_judged_it(
    step: int, evaluations: str, settled: bool
) -> None:
    """Whatever still lies in its topics: it will never be trained."""
    cluster = MemoryCluster({"in": 2, "features": 2, "checkpoints": 1, "evaluations": 1})
    create_topics(cluster, processor())
    await publish(cluster)
    cluster.write_markers("publisher")
    producer = await cluster.bus().producer()
    await (await producer.send("features", b"never trained", partition=1))
    said = {"job": "it", "step": step, "manifest": f"manifest-{step}", "offsets": {}}
    await (await producer.send("checkpoints", orjson.dumps(said), partition=0))
    for name in evaluations:
        await (await producer.send("evaluations", orjson.dumps({**said, "evaluation": name}), partition=0))
    judges = [Evaluation(name=name, trainer="it") for name in "ab"]
    assert await Settled(cluster.bus(), [processor()], [trainer()], judges).now() is settled
