"""When nothing is left to do: from end offsets that hold also while the broker still writes a transaction's markers."""

from __future__ import annotations

import asyncio

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.definitions.processor import Processor, Result
from megaflow_stream.runtime.settled import Settled
from megaflow_stream.testing import MemoryCluster, create_topics, drive


def processor() -> Processor:
    return Processor(name="nothing", source="in", build=lambda: lambda batch: Result(), sinks=[])


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
