"""What flows through a worker, and what does not: watermarks, backlog, liveness, long handlers, idleness."""

from __future__ import annotations

import asyncio
import gc
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaflow_stream.bus import TopicPartition, connect
from megaflow_stream.definitions.processor import Backlog, Dropped, Processor, Rejected, Result, Statistic
from megaflow_stream.observe.status import StatusWriter
from megaflow_stream.processing import engine as engines
from megaflow_stream.processing import liveness
from megaflow_stream.processing.engine import Engine, backlog_bytes
from megaflow_stream.processing.member import Options
from megaflow_stream.testing import MemoryBus, MemoryCluster, create_topics, drive
from megaflow_stream.testing.log import MemoryRecord
from megaflow_stream.testing.reader import MemoryReader
from tests.engine_cases.case import Case
from tests.engine_cases.gate import declared, finished, until, worker


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    prefix = f"flow.{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("ENGINE_CASE_PREFIX", prefix)
    return Case(prefix, partitions=2)


@pytest.mark.timeout(300)
async def test_a_handler_that_computes_for_longer_than_a_session_costs_no_membership(
    kafka: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_CASE_HANG_SECONDS", "120")
    bus = await connect(kafka)
    await case.create(bus)
    await case.load(bus, 600, special={100: "BURN"})
    work = declared(case, "plain", tmp_path)
    options = Options(session_seconds=6.0, heartbeat_seconds=2.0)
    engine, stop = Engine(bus, [work], options=options), asyncio.Event()
    task, given = asyncio.create_task(engine.run(stop)), 0
    while not await case.done(bus, work[1].group):
        given = max(given, len(engine.members[0].parts) if engine.members else 0)
        assert not task.done(), task.result()
        await asyncio.sleep(0.2)
    reader: Any = engine.members[0].reader
    generation = reader._consumer._coordinator.generation
    compute = engine.compute
    assert compute is not None
    burnt = compute.cpu_seconds()
    stop.set()
    await task
    assert (given, generation) == (2, 1)
    assert burnt > 15
    assert await case.problems(bus, dedup=False) == []
    await bus.close()


async def test_its_own_watermarks_pause_and_resume_a_partition_also_after_a_rebalance(
    case: Case, tmp_path: Path
) -> None:
    cluster, (_, processor) = MemoryCluster(), declared(case, "plain", tmp_path)
    await case.create(cluster.bus())
    await case.load(cluster.bus(), 4000)
    one_fetch = processor.batch_records * 600
    async with worker(cluster.bus(), processor) as running:
        await until(running.ready)
        before = dict(running.member.parts)
        for again in (False, True):
            if again:
                cluster.inject.rebalance(processor.group)
                await until(lambda: running.ready() and running.member.parts != before)
            await until(lambda: all(part.full for part in running.member.parts.values()))
            assert running.paused() == set(running.member.parts)
            for part in running.member.parts.values():
                assert processor.high_bytes < part.bytes_in_flight < processor.high_bytes + one_fetch
        running.gate.open.set()
        await finished(case, cluster, processor)
        assert running.paused() == set()
        assert [part.bytes_in_flight for part in running.member.parts.values()] == [0, 0]


async def test_a_low_mark_of_nothing_is_reached(case: Case, tmp_path: Path) -> None:
    cluster, (_, processor) = MemoryCluster(), declared(case, "plain", tmp_path)
    await case.create(cluster.bus())
    await case.load(cluster.bus(), 2000)
    async with worker(cluster.bus(), replace(processor, high_bytes=20_000, low_bytes=0)) as running:
        running.gate.open.set()
        await finished(case, cluster, processor)


async def test_the_backlog_downstream_holds_back_and_lets_go(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_BACKLOG_SECONDS", 0.01)
    cluster, (_, plain) = MemoryCluster(), declared(case, "plain", tmp_path)
    out = f"{case.prefix}.out"
    processor = replace(plain, backlog=Backlog(topic=out, group="reader", high_bytes=5000, low_bytes=1000))
    await case.create(cluster.bus())
    places = [TopicPartition(out, number) for number in range(2)]
    await commit(cluster.bus(), "reader", dict.fromkeys(places, 0))
    async with worker(cluster.bus(), processor) as running:
        running.gate.open.set()
        await case.load(cluster.bus(), 1000, seed=1)
        await until(lambda: running.member.held_back)
        assert running.paused() == set(running.member.parts)
        before = dict(running.member.parts)
        cluster.inject.rebalance(processor.group)
        await until(lambda: running.ready() and running.member.parts != before)
        assert running.paused() == set(running.member.parts)  # derived again
        assert running.member.liveness.late() == {}
        await case.load(cluster.bus(), 1000, seed=2)
        async with asyncio.timeout(30):
            while not await case.done(cluster.bus(), processor.group):
                await commit(cluster.bus(), "reader", await cluster.bus().end_offsets(places))
                await asyncio.sleep(0.02)
        await until(lambda: not running.member.held_back)
    assert await case.problems(cluster.bus(), dedup=False) == []


async def commit(bus: MemoryBus, group: str, offsets: dict[TopicPartition, int]) -> None:
    producer = await bus.producer(f"commits-{group}")
    await producer.begin()
    await producer.send_offsets(group, offsets)
    await producer.commit([])


async def test_a_backlog_is_measured_in_bytes_from_the_groups_position() -> None:
    cluster = MemoryCluster({"features.agent": 2})
    bus = cluster.bus()
    backlog = Backlog(topic="features.agent", group="megaflow.train.mine", high_bytes=2, low_bytes=1)
    for number in range(100):
        cluster.publish("features.agent", bytes(1000), partition=number % 2)
    assert await backlog_bytes(bus, backlog) is None  # nobody reads yet
    first, second = await bus.partitions("features.agent")
    await commit(bus, backlog.group, {first: 10})
    assert await backlog_bytes(bus, backlog) == 90_000
    await commit(bus, backlog.group, {first: 50, second: 49})
    assert await backlog_bytes(bus, backlog) == 1000
    await commit(bus, backlog.group, {second: 50})
    assert await backlog_bytes(bus, backlog) == 0


async def test_records_without_a_value_are_in_flight_too() -> None:
    """Else the position of an idle partition would be committed past them."""
    cluster = MemoryCluster({"in": 2})
    processor = Processor(name="nothing", source="in", build=lambda: lambda batch: Result(), sinks=[])
    create_topics(cluster, processor)
    async with worker(cluster.bus(), processor) as running:
        await until(running.ready)
        cluster.publish("in", None, key=b"k", partition=0)
        part = running.member.parts[TopicPartition("in", 0)]
        await until(lambda: part.next_offset == 1)
        assert part.bytes_in_flight > 0
        part.idle(1)
        assert part.idle_position is None
        running.gate.open.set()
        await until(lambda: cluster.committed(processor.group).get(TopicPartition("in", 0)) == 1)


async def test_one_partition_that_is_given_records_twice_costs_the_others_nothing(case: Case, tmp_path: Path) -> None:
    cluster, (_, processor) = MemoryCluster(), declared(case, "plain", tmp_path)
    await case.create(cluster.bus())
    await case.load(cluster.bus(), 400)
    async with worker(cluster.bus(), processor) as running:
        await until(running.ready)
        part = running.member.parts[TopicPartition(f"{case.prefix}.in", 0)]
        await until(lambda: part.next_offset > 0)
        part.put([MemoryRecord(f"{case.prefix}.in", 0, 0, 0, b"k", b"{}", ())])
        assert not part.ready
        await until(lambda: part.ready)  # from the committed offset again
        running.gate.open.set()
        await finished(case, cluster, processor)


@dataclass(frozen=True)
class Odd:
    """Handlers whose answers can never be written."""

    what: str

    def __call__(self) -> Any:
        return self.handle

    def handle(self, batch: Any) -> Result:
        import pyarrow as pa

        values = batch["value"].to_pylist()
        if self.what == "text" and b"odd" in values:
            return Result(dropped=[Dropped(0, "\ud800", "no text")])
        if self.what == "count" and b"odd" in values:
            return Result(statistics=[Statistic("d", "p", {"in": object()})])  # type: ignore[dict-item]
        if self.what == "offset":
            return Result(rejected=[Rejected(10_000, "not mine")] if b"odd" in values else [])
        made = [value * 100 if value == b"odd" else value for value in values]
        return Result(outputs={"out": pa.record_batch([pa.array(made, pa.binary())], ["value"])})


@pytest.mark.parametrize("what", ["offset", "size", "text", "count"])
async def test_an_answer_that_cannot_be_written_is_a_dead_letter_not_a_standstill(what: str) -> None:
    from megaflow_stream.definitions.processor import Sink

    cluster = MemoryCluster()
    cluster.create("in", 1)
    cluster.create("out", 1, {"max.message.bytes": "250"})
    processor = Processor(name=f"odd-{what}", source="in", build=Odd(what), sinks=[Sink(topic="out")])
    for value in (b"a", b"odd", b"b"):
        cluster.publish("in", value, partition=0)
    await drive(cluster, processor)
    assert [record.value for record in cluster.records("dlq")] == [b"odd"]
    if what != "offset":
        assert [record.value for record in cluster.records("out")] == [b"a", b"b"]


async def test_ten_thousand_idle_rounds_take_no_memory(case: Case, tmp_path: Path, monkeypatch: Any) -> None:
    cluster, (_, processor) = MemoryCluster({"status": 1, "status.events": 1}), declared(case, "dedup", tmp_path)
    await case.create(cluster.bus())
    await case.load(cluster.bus(), 100)
    rounds, fetch = 0, MemoryReader.fetch

    async def at_once(self: MemoryReader, *, timeout_seconds: float = 0.2, max_records: int | None = None) -> Any:
        nonlocal rounds
        rounds += 1
        return await fetch(self, timeout_seconds=0.0, max_records=max_records)

    monkeypatch.setattr(MemoryReader, "fetch", at_once)
    monkeypatch.setattr(engines, "_STATUS_SECONDS", 0.001)
    monkeypatch.setattr(engines, "_BACKLOG_SECONDS", 0.001)
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.001)
    backlog = Backlog(topic=f"{case.prefix}.out", group="megaflow.train.none", high_bytes=1 << 30, low_bytes=1 << 20)
    async with (
        StatusWriter(cluster.bus(), "worker/1", "worker") as status,
        worker(cluster.bus(), replace(processor, backlog=backlog), status=status) as running,
    ):
        running.gate.open.set()
        async with asyncio.timeout(30):
            while not await case.done(cluster.bus(), processor.group):
                await asyncio.sleep(0.01)
        await until(lambda: rounds > 2000)
        gc.collect()
        begun, rss, tasks = rounds, psutil.Process().memory_info().rss, len(asyncio.all_tasks())
        await until(lambda: rounds > begun + 10_000, 120)
        gc.collect()
        assert psutil.Process().memory_info().rss - rss < 1 << 20
        assert abs(len(asyncio.all_tasks()) - tasks) < 10
