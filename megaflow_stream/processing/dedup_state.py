"""The de-duplicator's memory for one input partition, and its changelog.

A changelog record holds the entries of one transaction, packed: 16 bytes of the record's key (a content hash), 8 bytes
of the offset that brought it first. It is written in the same transaction as the outputs, so memory and log agree
after every commit; on abort, fencing or revoke the memory is thrown away and restored.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

from megaflow_stream.bus.api import Bus, Record, TopicPartition
from megaflow_stream.errors import BadRecord, ServiceUnreachable

KEY_BYTES = 16
_STALL_SECONDS = 30.0
_ENTRY = struct.Struct("<16sq")


class DedupState:
    """Which content was seen first at which offset of the partition."""

    def __init__(self) -> None:
        self.first: dict[bytes, int] = {}

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
        """The changelog record of a batch. Rejected records are forgotten: a later copy gets its own chance."""
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

    def apply(self, packed: bytes) -> None:
        """Takes in one changelog record. The first offset of a key stays."""
        if len(packed) % _ENTRY.size:
            raise BadRecord(f"a changelog record of {len(packed)} bytes is not whole entries of {_ENTRY.size}")
        first = self.first
        for key, offset in _ENTRY.iter_unpack(packed):
            first.setdefault(key, offset)


async def restore(bus: Bus, changelog: TopicPartition) -> DedupState:
    """Reads the changelog, read_committed, from its first offset to its end offset.

    Raises `ServiceUnreachable` when nothing comes: a reader that has stalled is given up."""
    state = DedupState()
    (begin,) = (await bus.begin_offsets([changelog])).values()
    (end,) = (await bus.end_offsets([changelog])).values()
    if begin >= end:
        return state
    reader = await bus.reader(partition_fetch_bytes=8 << 20)
    try:
        reader.assign({changelog: begin})
        moved, at = begin, time.monotonic()
        while (position := await reader.position(changelog)) < end:
            if position != moved:
                moved, at = position, time.monotonic()
            elif time.monotonic() - at > _STALL_SECONDS:
                raise ServiceUnreachable(
                    f"restoring the state: nothing came for {_STALL_SECONDS:.0f} s",
                    **changelog._asdict(),
                    offset=position,
                )
            for records in (await reader.fetch(timeout_seconds=0.05)).values():
                for record in records:
                    state.apply(record.value or b"")
    finally:
        await reader.close()
    return state
