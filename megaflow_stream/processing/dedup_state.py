"""The de-duplicator's memory for one input partition, and its changelog.

A changelog record holds the entries of one batch, packed: 16 bytes of the record's key (a content hash), 8 bytes of
the offset that brought it first. Its key is the input offset at which the batch ended, its header `entries` counts the
entries of the log, these included. It is written in the same transaction as the outputs, so memory and log agree after
every commit; on abort, fencing or revoke the memory is thrown away and restored, and what was restored is counted
against the log: a reader that skips records would let duplicates pass, without an error.
"""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncIterator, Sequence

from megaflow_stream.bus.api import Bus, OutRecord, Reader, Record, TopicPartition
from megaflow_stream.errors import Damaged, ServiceUnreachable

KEY_BYTES = 16
_STALL_SECONDS = 30.0
_TAIL_OFFSETS = 16  # the last record and its marker, and a few aborted ones
_ENTRY = struct.Struct("<16sq")
_ENTRIES = "entries"


class DedupState:
    """Which content was seen first at which offset of the partition.

    written: the entries in its changelog, those of batches on their way included.
    end: the input offset before which the log's last entries were made.
    """

    def __init__(self) -> None:
        self.first: dict[bytes, int] = {}
        self.written = self.end = 0

    def __len__(self) -> int:
        return len(self.first)

    def fresh(self, records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
        """(records to process, duplicates); remembers the former.

        A record at the very offset that is remembered is a redelivery, not a duplicate, and passes."""
        keep, duplicates = [], []
        for record in records:
            key = record.key
            # Without a key of the right size there is nothing to compare by: the handler judges.
            if key is None or len(key) != KEY_BYTES or self.first.setdefault(key, record.offset) == record.offset:
                keep.append(record)
            else:
                duplicates.append(record)
        return keep, duplicates

    def entries(self, kept: Sequence[Record], rejected: set[int]) -> bytes:
        """The entries of processed records. Rejected ones are forgotten: another copy gets its own chance."""
        packed = bytearray()
        for record in kept:
            key = record.key
            if key is None or len(key) != KEY_BYTES:
                continue
            if record.offset in rejected:
                if self.first.get(key) == record.offset:
                    del self.first[key]
            else:
                packed += _ENTRY.pack(key, record.offset)
        return bytes(packed)

    def logged(self, packed: bytes, end: int) -> OutRecord | None:
        """The changelog record of a batch that ended before the input offset `end`; None without entries."""
        if not packed:
            return None
        self.written, self.end = self.written + len(packed) // _ENTRY.size, end
        return OutRecord(packed, b"%d" % end, [(_ENTRIES, b"%d" % self.written)])

    def apply(self, record: Record) -> None:
        """Takes in one changelog record. The first offset of a key stays. Raises `Damaged` where some are missing."""
        packed, first = record.value or b"", self.first
        if len(packed) % _ENTRY.size:
            raise _damaged(f"a changelog record of {len(packed)} bytes is not whole entries of {_ENTRY.size}", record)
        before, written = _counted(record) - len(packed) // _ENTRY.size, self.written
        if before != written:
            raise _damaged(f"{written} entries of the state were read where its changelog counts {before}", record)
        for key, offset in _ENTRY.iter_unpack(packed):
            first.setdefault(key, offset)
        self.written, self.end = _counted(record), int(record.key or 0)


async def restore(bus: Bus, changelog: TopicPartition, state: DedupState) -> None:
    """Fills `state` from the changelog, read_committed, from its first offset to its end offset.

    Raises `ServiceUnreachable` when nothing comes: a reader that has stalled is given up; `Damaged` when what came is
    not what the log counts."""
    (begin,) = (await bus.begin_offsets([changelog])).values()
    (end,) = (await bus.end_offsets([changelog])).values()
    if begin >= end:
        return
    reader = await bus.reader(partition_fetch_bytes=8 << 20)
    try:
        async for record in _records(reader, changelog, begin, end):
            if begin and not state.written:  # retention has taken the log's beginning
                state.written = _counted(record) - len(record.value or b"") // _ENTRY.size
            state.apply(record)
        last, back = None, _TAIL_OFFSETS
        while last is None and back <= 16 * (end - begin):
            async for record in _records(reader, changelog, max(begin, end - back), end):
                last = record
            back *= 16
    finally:
        await reader.close()
    if last is not None and _counted(last) != state.written:
        raise _damaged(f"{state.written} entries of the state were read, its changelog has {_counted(last)}", last)


async def _records(reader: Reader, partition: TopicPartition, begin: int, end: int) -> AsyncIterator[Record]:
    reader.assign({partition: begin})
    moved, at = begin, time.monotonic()
    while (position := await reader.position(partition)) < end:
        if position != moved:
            moved, at = position, time.monotonic()
        elif time.monotonic() - at > _STALL_SECONDS:
            raise ServiceUnreachable(
                f"restoring the state: nothing came for {_STALL_SECONDS:.0f} s", **partition._asdict(), offset=position
            )
        for records in (await reader.fetch(timeout_seconds=0.05)).values():
            for record in records:
                yield record


def _counted(record: Record) -> int:
    for name, value in record.headers:
        if name == _ENTRIES:
            return int(value)
    raise _damaged("a changelog record does not say how many entries there are", record)


def _damaged(message: str, record: Record) -> Damaged:
    return Damaged(
        message,
        hint="duplicates would pass: start the worker again; if it ends again, restore the topic, or delete its "
        "records to go on without what it knew",
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
    )
