"""A worker: the processors of a stage, in one event loop, with one compute process. Add workers by starting more.

Kafka ──▶ Member (a processor's group) ──▶ Partition (producer, state, queue) ──▶ Compute (another process)
                                               └─ one transaction an interval: outputs, dead letters, offsets
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaflow_stream.bus.api import Bus, TopicPartition
from megaflow_stream.definitions.processor import Backlog, Processor
from megaflow_stream.errors import MegaflowError, NotFound, SettingError
from megaflow_stream.observe.status import StatusWriter
from megaflow_stream.processing.compute import Compute, ProcessCompute
from megaflow_stream.processing.compute_process import Work
from megaflow_stream.processing.member import Member, Options

log = logging.getLogger(__name__)
_BACKLOG_SECONDS = 1.0
_STATUS_SECONDS = 1.0
_FETCH_BYTES = 1 << 20
_LIMIT = "max.message.bytes"
Positions = Mapping[TopicPartition, int]


class Engine:
    """Runs `processors` (each with the file that declares it) until `stop`.

    status: where the worker says how it is; None in tests.
    compute: another way to call handlers (in memory, for users' tests); by default a process of its own.
    """

    def __init__(
        self,
        bus: Bus,
        processors: Sequence[tuple[Path, Processor]],
        *,
        options: Options | None = None,
        status: StatusWriter | None = None,
        compute: Compute | None = None,
    ) -> None:
        self.bus, self.processors, self.options = bus, processors, options or Options()
        self.status, self.compute = status, compute
        self.members: list[Member] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Ends when `stop` is set, within a bound; raises what no retry can cure."""
        counts, limits, fetch_bytes = await self._topics()
        compute = self.compute or ProcessCompute(
            [Work(path=str(path), name=p.name, partitions=counts) for path, p in self.processors]
        )
        self.compute = compute
        self.members = [
            Member(self.bus, number, processor, compute, counts, self.options, fetch_bytes[processor.source], limits)
            for number, (_, processor) in enumerate(self.processors)
        ]
        try:
            if isinstance(compute, ProcessCompute):
                await _warmed(compute, stop)
            async with asyncio.TaskGroup() as group:
                watchers = [
                    group.create_task(self._backlog(member, member.processor.backlog))
                    for member in self.members
                    if member.processor.backlog is not None
                ]
                watchers += [group.create_task(self._ends(member)) for member in self.members]
                watchers.append(group.create_task(self._report()))
                runs = [group.create_task(member.run(stop)) for member in self.members]
                await asyncio.wait(runs, return_when=asyncio.ALL_COMPLETED)
                for watcher in watchers:
                    watcher.cancel()
        except* Exception as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        finally:
            await compute.close()

    async def _topics(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Partition counts and record limits of all topics, and how much to fetch of each source. A missing topic is an
        error now."""
        topics = await self.bus.topics()
        counts = {name: topic.partitions for name, topic in topics.items()}
        limits = {n: int(t.configs[_LIMIT]) for n, t in topics.items() if _LIMIT in t.configs}
        fetch_bytes: dict[str, int] = {}
        for _, processor in self.processors:
            needed = [processor.source, processor.dead_letters, processor.dropped, processor.statistics]
            needed += [sink.topic for sink in processor.sinks if "{" not in sink.topic]
            needed += [processor.state.changelog] if processor.state else []
            for name in needed:
                if name not in counts:
                    raise NotFound(
                        f"processor {processor.name} needs the topic {name}, which is not there",
                        hint="`megaflow topics apply` creates the project's topics",
                        topic=name,
                    )
            if processor.state and counts[processor.state.changelog] < counts[processor.source]:
                raise SettingError(
                    f"the changelog {processor.state.changelog} has {counts[processor.state.changelog]} partitions, "
                    f"its source {processor.source} has {counts[processor.source]}",
                    hint="give the changelog as many in its YAML, then `megaflow topics apply`",
                )
            # A fetch must take the largest batch of the topic, and a whole handler batch where it can.
            largest = limits.get(processor.source, _FETCH_BYTES)
            fetch_bytes[processor.source] = max(_FETCH_BYTES, largest, processor.batch_bytes // 2)
        return counts, limits, fetch_bytes

    async def _backlog(self, member: Member, backlog: Backlog) -> None:
        """Holds the member back while the readers of `backlog.topic` are too far behind, in bytes."""
        known = True
        while True:
            await asyncio.sleep(_BACKLOG_SECONDS)
            try:
                behind = await backlog_bytes(self.bus, backlog)
            except Exception as error:
                if known:
                    log.info("the backlog of %s is not known now: %s", backlog.group, error)
                known = False
                continue
            known = True
            if behind is not None and behind > backlog.high_bytes:
                member.hold_back(True)
            elif behind is None or behind < backlog.low_bytes:
                member.hold_back(False)

    async def _ends(self, member: Member) -> None:
        while True:
            with contextlib.suppress(MegaflowError):  # records in hand are seen without asking
                await member.liveness.look()
            await asyncio.sleep(member.liveness.look_seconds)

    async def _report(self) -> None:
        """Status once a second; tells slow (the handler computes) from stuck, and names the partition.

        Raises `Stuck` for one that stands still."""
        used, at, done = 0.0, time.monotonic(), 0
        told: set[str] = set()
        while True:
            await asyncio.sleep(_STATUS_SECONDS)
            assert self.compute is not None
            cpu, now = self.compute.cpu_seconds(), time.monotonic()
            total = sum(member.records_done for member in self.members)
            late = {tp: age for member in self.members for tp, age in member.liveness.late().items()}
            # A compute process that has died and was started again begins at 0.
            computing = (cpu - used if cpu >= used else cpu) > 0.05 * (now - at)
            for tp in late.keys() - told:
                log.error(
                    "%s has not moved for %.0f s: %s",
                    tp,
                    late[tp],
                    "slow, its handler computes" if computing else "stuck, nothing computes",
                )
            told = set(late)
            told_late = {tp: f"{seconds:.0f} s" for tp, seconds in late.items()}
            if self.status is not None:
                flight = sum(part.bytes_in_flight for m in self.members for part in m.parts.values())
                await self.status.update(
                    "running" if total != done or flight else "idle",
                    records=total,
                    rate=round((total - done) / (now - at), 1),
                    transactions=sum(m.transactions for m in self.members),
                    dropped=sum(m.dropped for m in self.members),
                    rejected=sum(m.rejected for m in self.members),
                    bytes_in_flight=flight,
                    partitions={m.processor.name: sorted(tp.partition for tp in m.parts) for m in self.members},
                    held_back=[m.processor.name for m in self.members if m.held_back],
                    slow=told_late if computing else {},
                    stuck={} if computing else told_late,
                )
            used, at, done = cpu, now, total


async def _warmed(compute: ProcessCompute, stop: asyncio.Event) -> None:
    """A worker takes partitions from others only when it can work on them: imports may take seconds."""
    waits = asyncio.ensure_future(compute.warm()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        warming, stopped = waits
        stopped.cancel()
        if not warming.done():
            warming.cancel()
        await asyncio.wait(waits)
    if not warming.cancelled():
        warming.result()


async def backlog_bytes(bus: Bus, backlog: Backlog) -> float | None:
    """How far `backlog.group` is behind on `backlog.topic`: records behind times the mean bytes of recent records.

    None while the group has no position: nobody reads yet, and nobody is to wait for that. A trainer's group is at its
    plan's end."""
    partitions = await bus.partitions(backlog.topic)
    committed = await bus.committed(backlog.group)  # before the ends: never negative
    if not committed:
        return None
    begins = await bus.begin_offsets(partitions)
    ends = await bus.end_offsets(partitions)
    lag = {tp: ends[tp] - max(committed.get(tp, begins[tp]), begins[tp]) for tp in partitions}
    records = sum(max(0, n) for n in lag.values())
    return records * await _bytes_per_record(bus, lag, ends) if records else 0.0


async def _bytes_per_record(bus: Bus, lag: Positions, ends: Positions) -> float:
    """The mean size of the last few records of the partition that is furthest behind."""
    tp = max(lag, key=lambda partition: lag[partition])
    reader = await bus.reader(partition_fetch_bytes=1 << 16)
    try:
        reader.assign({tp: ends[tp] - min(lag[tp], 64)})
        for records in (await reader.fetch(timeout_seconds=1.0, max_records=64)).values():
            return sum(len(r.value or b"") for r in records) / len(records)
        return 0.0
    finally:
        await reader.close()
