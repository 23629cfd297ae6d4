"""The rows of lineage that a rank gathers between checkpoints: which record, of which conversation, in which step."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.checkpoint.lineage import SCHEMA


class LineageRows:
    """Grows by what this rank trains; `take` empties it."""

    def __init__(self) -> None:
        self._columns: list[list[object]] = [[] for _ in SCHEMA]

    def add(self, partition: TopicPartition, offset: int, step: int, conversations: Sequence[str]) -> None:
        """A packed sequence: a row for each conversation in it, once."""
        for conversation in dict.fromkeys(conversations):
            row = (conversation, partition.topic, partition.partition, offset, step)
            for column, value in zip(self._columns, row, strict=True):
                column.append(value)

    def take(self) -> bytes:
        """The rows so far as an Arrow IPC stream."""
        arrays = [pa.array(c, f.type) for c, f in zip(self._columns, SCHEMA, strict=True)]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        for column in self._columns:
            column.clear()
        return bytes(sink.getvalue())


def from_bytes(payloads: Sequence[bytes]) -> pa.Table:
    """The rows of all ranks, ordered by step and place, whichever rank trained them."""
    table = pa.concat_tables([pa.ipc.open_stream(p).read_all() for p in payloads]) if payloads else SCHEMA.empty_table()
    order = [(name, "ascending") for name in ("step", "topic", "partition", "offset", "conversation")]
    return table.sort_by(order).combine_chunks()
