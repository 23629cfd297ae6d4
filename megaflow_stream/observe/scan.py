"""Reads part of a topic from first to last, once: what every report does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from megaflow_stream.bus.api import Bus, Record, TopicPartition
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.errors import ServiceUnreachable


async def scan(
    bus: Bus,
    topic: str,
    *,
    begin: Mapping[TopicPartition, int] | None = None,
    end: Mapping[TopicPartition, int] | None = None,
    stall_seconds: float = 20.0,
    clock: Clock | None = None,
) -> AsyncGenerator[Record, None]:
    """Every committed record of `topic` in [begin, end), in order within each partition.

    begin, end: offsets by partition; without them, all that was committed when the call began. It ends at the end
    offset, however many markers, aborted or compacted records lie before it. Raises `NotFound` without the topic and
    `ServiceUnreachable` when nothing moved for `stall_seconds`. A caller that leaves it early closes it
    (`contextlib.aclosing`), for it holds a reader.
    """
    clock = clock or SystemClock()
    partitions = await bus.partitions(topic) if begin is None else list(begin)
    first = await bus.begin_offsets(partitions)
    last = dict(end) if end is not None else await bus.end_offsets(partitions)
    start = {p: max(first[p], (begin or first)[p]) for p in partitions}
    left = {p for p in partitions if start[p] < last[p]}
    if not left:
        return
    reader = await bus.reader()
    try:
        reader.assign({p: start[p] for p in left})
        moved, at = dict(start), clock.monotonic()
        while left:
            fetched = await reader.fetch(timeout_seconds=0.1)
            for partition, records in fetched.items():
                for record in records:
                    if partition in left and record.offset < last[partition]:
                        yield record
            for partition in list(left):
                position = await reader.position(partition)
                if position != moved[partition]:
                    moved[partition], at = position, clock.monotonic()
                if position >= last[partition]:
                    left.discard(partition)
                    reader.pause(partition)
            if left and clock.monotonic() - at > stall_seconds:
                partition = min(left)
                raise ServiceUnreachable(
                    f"reading a topic: no record came for {stall_seconds:.0f} s",
                    hint="Is the broker up? `megaflow services status` says so.",
                    topic=topic,
                    partition=partition.partition,
                    offset=moved[partition],
                )
    finally:
        await reader.close()
