"""Reading on in a topic: each record once, and nothing read again."""

from __future__ import annotations

import orjson
import pytest

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.errors import ServiceUnreachable
from megaflow_stream.observe.follow import Following
from megaflow_stream.runtime.settled import Settled
from megaflow_stream.testing import MemoryCluster
from megaflow_stream.testing.reader import MemoryReader


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of every record that any reader is given."""
    offsets: list[int] = []
    take = MemoryReader._take

    def taking(self: MemoryReader, max_records: int | None) -> object:
        found = take(self, max_records)
        offsets.extend(record.offset for records in found.values() for record in records)
        return found

    monkeypatch.setattr(MemoryReader, "_take", taking)
    return offsets


async def test_each_record_comes_once(fetched: list[int]) -> None:
    cluster = MemoryCluster()
    following = Following(cluster.bus(), "t")
    assert await following.new() == []  # the topic is not there
    cluster.create("t", 2)
    for number in range(6):
        cluster.publish("t", b"%d" % number, partition=number % 2)
    assert sorted(r.value for r in await following.new()) == [b"%d" % n for n in range(6)]
    assert await following.new() == []
    cluster.publish("t", b"6", partition=1)
    cluster.inject.gap(TopicPartition("t", 0), 3)
    assert [r.value for r in await following.new()] == [b"6"]
    assert len(fetched) == 7


async def test_after_an_error_nothing_is_missed() -> None:
    cluster = MemoryCluster({"t": 1})
    following = Following(cluster.bus(), "t")
    cluster.publish("t", b"0", partition=0)
    for calls in range(1, 4):
        cluster.inject.unreachable(calls)
        for _ in range(calls):
            with pytest.raises(ServiceUnreachable):
                await following.new()
    assert [r.value for r in await following.new()] == [b"0"]


async def test_what_is_retained_is_read_where_retention_went_on() -> None:
    cluster = MemoryCluster({"t": 1})
    following = Following(cluster.bus(), "t")
    for number in range(4):
        cluster.publish("t", b"%d" % number, partition=0)
        await following.new()
    for number in range(4, 8):
        cluster.publish("t", b"%d" % number, partition=0)
    cluster.truncate(TopicPartition("t", 0), 6)
    assert [r.value for r in await following.new()] == [b"6", b"7"]


async def test_whether_a_run_is_settled_costs_no_more_as_the_logs_grow(fetched: list[int]) -> None:
    cluster = MemoryCluster({"features": 1, "checkpoints": 1, "evaluations": 1})
    trainer = Trainer.__new__(Trainer)
    for name, value in {"name": "mine", "data": "features", "max_steps": None}.items():
        object.__setattr__(trainer, name, value)
    judge = Evaluation(name="judge", trainer="mine")
    cluster.publish("features", b"x", partition=0)

    def checkpoint(step: int) -> None:
        value = {"job": "mine", "manifest": f"m{step}", "offsets": {"features/0": 1}}
        cluster.publish("checkpoints", orjson.dumps(value), key=b"mine")
        cluster.publish("evaluations", orjson.dumps({**value, "evaluation": "judge"}), key=b"mine")

    settled = Settled(cluster.bus(), [], [trainer], [])
    for step in range(500):
        checkpoint(step)
    assert await settled._trained(trainer)
    assert await settled._evaluated(judge, {"manifest": "m499"})
    assert not await settled._evaluated(judge, {"manifest": "m500"})
    read = len(fetched)
    for _ in range(20):
        assert await settled._trained(trainer)
        assert await settled._evaluated(judge, {"manifest": "m499"})
    checkpoint(500)
    assert await settled._evaluated(judge, {"manifest": "m500"})
    assert (await settled.checkpoint("mine") or {})["manifest"] == "m500"
    assert len(fetched) == read + 2


async def test_it_may_begin_where_a_mark_was_made(fetched: list[int]) -> None:
    cluster = MemoryCluster({"t": 2})
    bus = cluster.bus()
    producer = await bus.producer()
    for partition, value in ((0, b"old"), (0, b"older"), (1, b"old")):
        await (await producer.send("t", value, partition=partition))
    following = Following(bus, "t", await bus.end_offsets(await bus.partitions("t")))
    assert await following.new() == []
    await (await producer.send("t", b"new", partition=1))
    assert [record.value for record in await following.new()] == [b"new"]
    assert fetched == [1]
