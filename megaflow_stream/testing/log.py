"""The log of one partition in memory: offsets with gaps, transactions, markers, the last stable offset."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple

from megaflow_stream.bus.api import Isolation, TopicPartition


class MemoryRecord(NamedTuple):
    """See `bus.api.Record`. `timestamp` is in milliseconds since the epoch."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of key, value and headers, and what Kafka's record batch of one record adds (about 70)."""
        headers = sum(len(name) + len(value or b"") + 2 for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + headers + 70


class Transaction:
    """A producer's transaction: open, then committed or aborted. `offsets`: the groups' next offsets it carries."""

    def __init__(self, transactional_id: str, epoch: int) -> None:
        self.transactional_id, self.epoch = transactional_id, epoch
        self.state: Literal["open", "committed", "aborted"] = "open"
        self.logs: list[PartitionLog] = []
        self.offsets: dict[str, dict[TopicPartition, int]] = {}

    @property
    def empty(self) -> bool:
        return not self.logs and not self.offsets


class PartitionLog:
    """What a broker keeps of one partition.

    begin: the first offset that is retained. end: the high watermark, the next record's offset.
    """

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.begin = self.end = 0
        self._offsets: list[int] = []
        self._entries: list[tuple[MemoryRecord, Transaction | None]] = []
        self._open: dict[Transaction, int] = {}  # the first offset of each open transaction

    def append(self, record: MemoryRecord, transaction: Transaction | None) -> int:
        """Writes a record at the end; the offset that it has there."""
        record = record._replace(offset=self.end)
        if transaction is not None and transaction not in self._open:
            self._open[transaction] = record.offset
            transaction.logs.append(self)
        self._offsets.append(record.offset)
        self._entries.append((record, transaction))
        self.end += 1
        return record.offset

    def mark(self, transaction: Transaction) -> None:
        """Writes the marker that ends a transaction here. It takes an offset, and no reader is shown it."""
        del self._open[transaction]
        self.end += 1

    def gap(self, count: int) -> None:
        """Leaves out `count` offsets, as compaction does."""
        self.end += count

    def truncate(self, offset: int) -> None:
        """Forgets what is older than `offset`, as retention does."""
        self.begin = max(self.begin, min(offset, self.end))
        first = bisect_left(self._offsets, self.begin)
        del self._offsets[:first], self._entries[:first]

    @property
    def stable(self) -> int:
        """The last stable offset: the first record of the oldest open transaction, else the high watermark (KIP-98)."""
        return min(self._open.values(), default=self.end)

    def limit(self, isolation: Isolation) -> int:
        """The offset up to which a reader may read."""
        return self.stable if isolation == "read_committed" else self.end

    def read(
        self, position: int, isolation: Isolation, max_records: int | None, max_bytes: int
    ) -> tuple[list[MemoryRecord], int]:
        """Records from `position` on, at least one where there is one, and the position after them: past the markers
        and the aborted records that follow."""
        found: list[MemoryRecord] = []
        size_bytes = 0
        for record in self._readable(position, isolation):
            if found and size_bytes + record.size_bytes > max_bytes:
                return found, found[-1].offset + 1
            found.append(record)
            size_bytes += record.size_bytes
            if max_records is not None and len(found) >= max_records:
                return found, record.offset + 1
        return found, max(position, self.limit(isolation))

    def _readable(self, position: int, isolation: Isolation) -> Iterator[MemoryRecord]:
        limit = self.limit(isolation)
        for index in range(bisect_left(self._offsets, position), len(self._entries)):
            record, transaction = self._entries[index]
            if record.offset >= limit:
                return
            if isolation == "read_uncommitted" or transaction is None or transaction.state == "committed":
                yield record
