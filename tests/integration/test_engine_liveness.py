"""Slow, stuck, frozen, gone: who waits, what is killed, and which worker ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from asyncio.subprocess import PIPE
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megaflow_stream.bus import Producer, TopicPartition
from megaflow_stream.errors import ServiceUnreachable
from megaflow_stream.observe.status import StatusWriter, read_status
from megaflow_stream.processing import engine as engines
from megaflow_stream.processing.compute import ProcessCompute
from megaflow_stream.processing.compute_process import Work
from megaflow_stream.processing.engine import Engine
from megaflow_stream.processing.frames import HEAD
from megaflow_stream.processing.liveness import Stuck
from megaflow_stream.testing import MemoryBus, MemoryCluster
from tests.engine_cases.case import Case
from tests.engine_cases.gate import OPTIONS, declared, finished, until, worker

PATIENT = replace(OPTIONS, stuck_seconds=60.0)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    prefix = f"liveness.{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("ENGINE_CASE_PREFIX", prefix)
    monkeypatch.setattr(engines, "_STATUS_SECONDS", 0.02)
    return Case(prefix, partitions=2)


class Refusing:
    """A bus that starts no producer of one id, and does not answer at all while it is away."""

    def __init__(self, bus: MemoryBus, transactional_id: str) -> None:
        self.bus, self.transactional_id, self.refused, self.away = bus, transactional_id, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bus, name)

    async def producer(self, transactional_id: str | None = None, **options: Any) -> Producer:
        if transactional_id == self.transactional_id:
            self.refused += 1
            raise ServiceUnreachable("no coordinator")
        return await self.bus.producer(transactional_id, **options)

    async def end_offsets(self, *asked: Any, **options: Any) -> dict[TopicPartition, int]:
        if self.away:
            raise ServiceUnreachable("nobody answers")
        return await self.bus.end_offsets(*asked, **options)


async def test_slow_is_told_from_stuck_and_the_partition_is_named(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megaflow_stream.observe.status.EVERY_SECONDS", 0.02)
    cluster, (_, processor) = MemoryCluster({"status": 1, "status.events": 1}), declared(case, "plain", tmp_path)
    await case.create(cluster.bus())
    await case.load(cluster.bus(), 100)
    one, other = (f"{case.prefix}.in/{number}" for number in range(2))

    async def shows(name: str, partitions: set[str]) -> None:
        async with asyncio.timeout(20):
            while True:
                found = (await read_status(cluster.bus())).get("worker/1", {})
                if set(found.get(name, ())) == partitions:
                    return
                await asyncio.sleep(0.02)

    async with (
        StatusWriter(cluster.bus(), "worker/1", "worker") as status,
        worker(cluster.bus(), processor, status=status) as running,
    ):
        await shows("stuck", {one, other})
        assert f"{one} has not moved" in caplog.text
        assert "stuck, nothing computes" in caplog.text
        running.gate.computing = True
        await shows("slow", {one, other})
        await shows("stuck", set())
        running.gate.computing = False
        # What is at its handler ends no worker: the handler has a clock of its own.
        await until(lambda: running.member.liveness.late()[one] > 4 * OPTIONS.stuck_seconds)
        running.gate.open.set()
        await finished(case, cluster, processor)
        await shows("slow", set())
        await shows("stuck", set())


async def test_a_consumer_that_stalls_in_silence_ends_the_worker(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is in hand, and records wait; the handlers of the other partition seem to compute."""
    cluster, (_, processor) = MemoryCluster(), declared(case, "plain", tmp_path)
    await case.create(cluster.bus())
    async with worker(cluster.bus(), processor) as running:
        running.gate.computing = True
        running.gate.open.set()
        await until(running.ready)
        running.member.reader.pause(TopicPartition(f"{case.prefix}.in", 1))
        await case.load(cluster.bus(), 100)
        with pytest.raises(Stuck, match=r"stands still .*none is read .*partition 1") as ended:
            await running.ends()
    assert ended.value.exit_code == 1
    assert f"{case.prefix}.in/1 has not moved" in caplog.text
    async with worker(cluster.bus(), processor) as running:
        running.gate.open.set()
        await finished(case, cluster, processor)


async def test_a_partition_that_cannot_begin_fills_no_log(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, (_, processor) = MemoryCluster(), declared(case, "plain", tmp_path)
    await case.create(cluster.bus())
    await case.load(cluster.bus(), 100)
    refusing = Refusing(cluster.bus(), f"{processor.group}.{case.prefix}.in.1")
    async with worker(refusing, processor, options=PATIENT) as running:
        running.gate.open.set()
        await until(lambda: refusing.refused >= 4)
        assert caplog.text.count("thrown away") <= 3  # of the 1st, 2nd and 4th time
        refusing.transactional_id = ""
        await finished(case, cluster, processor)


async def test_a_partition_that_cannot_begin_ends_the_worker_unless_the_broker_is_away(
    case: Case, tmp_path: Path
) -> None:
    cluster, (_, processor) = MemoryCluster(), declared(case, "plain", tmp_path)
    await case.create(cluster.bus())
    await case.load(cluster.bus(), 100)
    refusing, stuck = Refusing(cluster.bus(), f"{processor.group}.{case.prefix}.in.1"), f"{case.prefix}.in/1"
    refusing.away = True
    async with worker(refusing, processor) as running:
        running.gate.open.set()
        await until(lambda: bool(running.engine.members))
        await until(lambda: running.member.liveness.late().get(stuck, 0) > 4 * OPTIONS.stuck_seconds)
        assert not running.task.done()
        refusing.away = False
        with pytest.raises(Stuck, match=r"it cannot begin: no coordinator .*partition 1"):
            await running.ends()


async def test_an_assignment_that_comes_while_a_worker_leaves_is_left_to_the_next(case: Case, tmp_path: Path) -> None:
    cluster, (_, processor) = MemoryCluster(), declared(case, "plain", tmp_path)
    await case.create(cluster.bus())
    await case.load(cluster.bus(), 400)
    async with worker(cluster.bus(), processor) as running:
        await until(running.ready)
        running.stop.set()
        await until(lambda: running.member.leaving)
        generation = cluster.group(processor.group).generation
        cluster.inject.rebalance(processor.group)
        await running.ends()
        assert cluster.group(processor.group).generation > generation
        assert running.member.parts == {}
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith(processor.name)] == []
    async with worker(cluster.bus(), processor) as running:
        running.gate.open.set()
        await finished(case, cluster, processor)


async def test_a_partition_that_is_revoked_while_its_record_hangs(case: Case, tmp_path: Path) -> None:
    """The clock goes on although nobody waits for the answer; what was behind it in the pipe is not blamed."""
    cluster, (path, plain) = MemoryCluster(), declared(case, "plain", tmp_path)
    processor = replace(plain, batch_records=1, tries=2, hang_seconds=0.5)
    await case.create(cluster.bus())
    await case.load(cluster.bus(), 40, special={8: "HANG"})
    compute = ProcessCompute([Work(path=str(path), name=processor.name, partitions={})])
    engine, stop = Engine(cluster.bus(), [(path, processor)], options=PATIENT, compute=compute), asyncio.Event()
    task = asyncio.create_task(engine.run(stop))
    hanging = TopicPartition(f"{case.prefix}.in", 0)
    await until(lambda: bool(engine.members) and hanging in engine.members[0].parts)
    part = engine.members[0].parts[hanging]
    await until(lambda: part.calling and compute.cpu_seconds() > 0)
    used = compute.cpu_seconds()
    await until(lambda: compute.cpu_seconds() > used + 0.2)
    cluster.inject.rebalance(processor.group)
    await until(lambda: part is not engine.members[0].parts.get(hanging, part))
    await finished(case, cluster, processor)
    stop.set()
    await task


async def test_a_compute_process_that_is_stopped_is_replaced_and_nothing_is_blamed(case: Case, tmp_path: Path) -> None:
    path, processor = declared(case, "plain", tmp_path)
    compute = ProcessCompute([Work(path=str(path), name=processor.name, partitions={})])
    columns = [pa.array([7]), pa.array([0]), pa.array([b"k"]), pa.array([b'{"n":1,"body":"x"}'])]
    batch = pa.record_batch(columns, ["offset", "timestamp", "key", "value"])
    first = await compute.call(0, batch, 1.0)
    process = compute._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    both = await asyncio.gather(compute.call(0, batch, 1.0), compute.call(0, batch, 1.0))
    assert both == [first, first]
    assert await process.wait() == -signal.SIGKILL
    await compute.close()


async def test_a_compute_process_that_cannot_take_a_batch_ends(case: Case, tmp_path: Path) -> None:
    path, processor = declared(case, "plain", tmp_path)
    works = json.dumps([asdict(Work(path=str(path), name=processor.name, partitions={}))])
    command = [sys.executable, "-m", "megaflow_stream.processing.compute_process", works]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(HEAD.pack(0, 1 << 62))  # and stdin stays open
    errors = await asyncio.wait_for(process.stderr.read(), 60)
    assert await process.wait() == 1
    assert b"MemoryError" in errors
