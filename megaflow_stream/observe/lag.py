"""How far behind readers are, in records, bytes and seconds, from positions.

An offset difference is not a number of records: transaction markers, aborted and compacted records take offsets too.
So a small gap is read, read_committed, up to the last stable offset (LSO), and its records are counted; of a large
one the beginning is read, and the rest is estimated from it, and said to be. The committed position is read before
the end, so that no lag is negative. Records of an open transaction can be read by nobody yet: they are no lag, but
shown by `open_transactions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megaflow_stream.bus.api import Bus, Reader, Record, TopicPartition
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.errors import NotFound, RecordsExpired

COUNTED_OFFSETS = 20_000  # gaps up to this are read and counted
COUNTED_BYTES = 32 << 20
READ_SECONDS = 5.0  # for all partitions of one reader together


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """Somebody who reads topics and has a position in each partition.

    group: the Kafka consumer group that holds the positions, or a name where `positions` are given.
    topics: what it reads; a partition without a position is behind from its beginning.
    positions: next offsets, for a reader that keeps them elsewhere (a trainer: in its checkpoints).
    """

    group: str
    topics: Sequence[str]
    positions: Mapping[TopicPartition, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionLag:
    """One partition of one group.

    position: the next offset that the group will read; None where it has none yet.
    stable_offset, high_watermark: the ends for read_committed and for all records.
    records, bytes, seconds: unread; seconds since the oldest unread record was written. None: unknown.
    exact: whether records and bytes were counted, not estimated.
    open_transactions: whether a transaction is open on the partition now (1 or 0).
    expired_records: offsets that retention removed before they were read.
    """

    group: str
    topic: str
    partition: int
    position: int | None
    stable_offset: int
    high_watermark: int
    records: int
    bytes: int
    seconds: float | None
    exact: bool
    open_transactions: int
    expired_records: int = 0

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Gap:
    """What was read of one partition's unread part."""

    begin: int
    end: int
    records: int = 0
    size_bytes: int = 0
    first_ms: int | None = None
    position: int = 0

    def take(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.offset >= self.end:
                break
            self.records += 1
            self.size_bytes += record_bytes(record)
            if self.first_ms is None:
                self.first_ms = record.timestamp


def record_bytes(record: Record) -> int:
    """Bytes of a record's key, value and headers, without the batch's overhead."""
    size = len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:  # no generator: this is called for every record
        size += len(name) + len(value or b"")
    return size


async def measure(bus: Bus, followers: Iterable[Follower], *, clock: Clock | None = None) -> list[PartitionLag]:
    """The lag of every partition of every topic of every follower. Topics that are not there yet are left out."""
    clock = clock or SystemClock()
    reader: Reader | None = None
    found: list[PartitionLag] = []
    try:
        for follower in followers:
            partitions: list[TopicPartition] = []
            for topic in follower.topics:
                try:
                    partitions += await bus.partitions(topic)
                except NotFound:
                    continue
            if not partitions:
                continue
            # In this order: an end that is asked for later is never before the position.
            held = follower.positions
            positions = await bus.committed(follower.group) if held is None else held
            begins = await bus.begin_offsets(partitions)
            stable = await bus.end_offsets(partitions)
            high = await bus.end_offsets(partitions, isolation="read_uncommitted")
            gaps = {
                p: _Gap(max(positions.get(p, begins[p]), begins[p]), stable[p])
                for p in partitions
                if max(positions.get(p, begins[p]), begins[p]) < stable[p]
            }
            if gaps:
                reader = reader or await bus.reader()
                await _look(reader, gaps, clock)
            for p in partitions:
                gap = gaps.get(p) or _Gap(stable[p], stable[p], position=stable[p])
                records, size_bytes, exact = _extent(gap)
                unread = gap.first_ms is not None
                found.append(
                    PartitionLag(
                        group=follower.group,
                        topic=p.topic,
                        partition=p.partition,
                        position=positions.get(p),
                        stable_offset=stable[p],
                        high_watermark=high[p],
                        records=records,
                        bytes=size_bytes,
                        seconds=max(0.0, clock.now() - (gap.first_ms or 0) / 1000)
                        if unread
                        else (0.0 if not records else None),
                        exact=exact,
                        open_transactions=int(high[p] > stable[p]),
                        expired_records=max(0, begins[p] - positions.get(p, begins[p])),
                    )
                )
    finally:
        if reader is not None:
            await reader.close()
    return found


async def _look(reader: Reader, gaps: Mapping[TopicPartition, _Gap], clock: Clock) -> None:
    """Reads each gap: a small one to its end, of a large one what the first fetch brings."""
    for gap in gaps.values():
        gap.position = gap.begin
    left = dict(gaps)
    reader.assign({p: gap.begin for p, gap in left.items()})
    deadline = clock.monotonic() + READ_SECONDS
    while left and clock.monotonic() < deadline:
        try:
            fetched = await reader.fetch(timeout_seconds=0.1)
        except RecordsExpired:  # retention went on meanwhile: what was seen so far has to do
            return
        for p, records in fetched.items():
            if p in left:
                left[p].take(records)
        for p, gap in list(left.items()):
            gap.position = max(gap.position, min(gap.end, await reader.position(p)))
            large = gap.end - gap.begin > COUNTED_OFFSETS or gap.size_bytes > COUNTED_BYTES
            if gap.position >= gap.end or (large and gap.records):
                del left[p]
                reader.pause(p)


def _extent(gap: _Gap) -> tuple[int, int, bool]:
    """(records, bytes, exact) of a gap: counted, or the part read scaled up to the whole."""
    if gap.position >= gap.end:
        return gap.records, gap.size_bytes, True
    read = gap.position - gap.begin
    if not read or not gap.records:
        return gap.end - gap.begin, gap.size_bytes, False
    scale = (gap.end - gap.begin) / read
    return math.ceil(gap.records * scale), math.ceil(gap.size_bytes * scale), False


def offsets_of(written: object) -> dict[TopicPartition, int]:
    """{"TOPIC/P": offset} as positions."""
    found = {}
    for name, offset in written.items() if isinstance(written, dict) else ():
        topic, _, partition = str(name).rpartition("/")
        if topic and partition.isdigit() and isinstance(offset, int):
            found[TopicPartition(topic, int(partition))] = offset
    return found
