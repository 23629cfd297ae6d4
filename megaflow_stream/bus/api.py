"""What MegaFlow asks of a bus. Two implement it: `bus.kafka` (aiokafka) and `megaflow_stream.testing` (in memory).

Offsets have gaps (transaction markers, aborted records, compaction): nothing relies on +1. Every reader is
read_committed unless it says otherwise. Errors are `MegaflowError`s: `Fenced` when another producer has taken the
transactional id, `ServiceUnreachable` when no broker answers, `BusError` (with `retriable`) for the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

Isolation = Literal["read_committed", "read_uncommitted"]
Headers = Sequence[tuple[str, bytes]]


def json_headers(schema: str) -> Headers:
    """Of a value in JSON. schema: the name and version of its layout, such as `megaflow.status/1`."""
    return [("content-type", b"application/json"), ("schema", schema.encode())]


class TopicPartition(NamedTuple):
    """One partition of one topic; equal to aiokafka's tuple of the same fields."""

    topic: str
    partition: int


class Record(Protocol):
    """A record as read. `timestamp` is in milliseconds since the epoch."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Headers: ...


class OutRecord(NamedTuple):
    """A record to be written: `send_many` takes a list of them."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as the cluster has it."""

    name: str
    partitions: int
    configs: Mapping[str, str] = field(default_factory=dict)


class Producer(Protocol):
    """Writes records, idempotently, acks=all. With a transactional id also in transactions.

    A producer whose call raised anything is thrown away, never used again: errors of a transactional producer have
    many names, and each may mean that it has been fenced.
    """

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[int]:
        """Puts a record into the buffer, waiting for room; the future gives its offset once acknowledged.

        Without `partition` the key's hash chooses it (murmur2, as every Kafka client); without a key, any."""
        ...

    async def send_many(self, topic: str, partition: int, records: Sequence[OutRecord]) -> list[asyncio.Future[object]]:
        """Puts many records for one partition into the buffer in as few batches as fit; futures to await."""
        ...

    async def begin(self) -> None: ...

    async def send_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Adds a group's next offsets to the open transaction."""
        ...

    async def commit(self, sent: Iterable[asyncio.Future[object]]) -> None:
        """Awaits every send of the transaction, then commits: a failed send is an error, never skipped.

        Decided when it returns; seen a little later by readers and by `committed()`, as the broker writes the markers
        afterwards. Seen for certain once `Bus.producer` has answered for the same id."""
        ...

    async def abort(self) -> None: ...

    async def flush(self) -> None: ...

    async def close(self) -> None:
        """Ends within five seconds, whatever the broker does."""
        ...


class Reader(Protocol):
    """Reads partitions that its caller names (`assign`), from offsets that its caller names."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Reads exactly these partitions, from these offsets, from now on."""
        ...

    def seek(self, partition: TopicPartition, offset: int) -> None: ...

    def pause(self, *partitions: TopicPartition) -> None: ...

    def resume(self, *partitions: TopicPartition) -> None: ...

    async def fetch(
        self, *, timeout_seconds: float = 0.2, max_records: int | None = None
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """The next records of any assigned partition, in order within each; empty after the timeout.

        Raises `RecordsExpired` when a position is older than what the topic retains."""
        ...

    async def position(self, partition: TopicPartition) -> int:
        """The next offset to be read: past markers and aborted records that were skipped."""
        ...

    async def close(self) -> None: ...


class Assignment(Protocol):
    """What a group member is told. Both callbacks are quick: they note, pause and start tasks."""

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None: ...

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None: ...


class GroupReader(Reader, Protocol):
    """A member of a consumer group: its partitions come and go by rebalances."""

    async def committed(self, partition: TopicPartition) -> int | None:
        """The group's committed next offset, asked of the broker now; None when there is none."""
        ...


class Bus(Protocol):
    """A connection to a cluster; makes producers and readers, and answers questions about topics."""

    async def producer(
        self, transactional_id: str | None = None, *, transaction_timeout_seconds: float = 20.0
    ) -> Producer:
        """A started producer. With a transactional id: InitProducerId has been answered, so every older producer of
        that id is fenced, and its open transaction has ended."""
        ...

    async def reader(
        self, *, isolation: Isolation = "read_committed", partition_fetch_bytes: int = 1 << 20
    ) -> Reader: ...

    async def group_reader(
        self,
        group: str,
        topics: Sequence[str],
        assignment: Assignment,
        *,
        session_seconds: float = 10.0,
        heartbeat_seconds: float = 3.0,
        partition_fetch_bytes: int = 1 << 20,
    ) -> GroupReader:
        """A started member of `group`, subscribed to `topics`; new partitions arrive paused, at no position: whoever
        takes one seeks, then resumes (`BusError` from `fetch` otherwise)."""
        ...

    async def partitions(self, topic: str) -> list[TopicPartition]:
        """Raises `NotFound` where the topic is not there."""
        ...

    async def begin_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]: ...

    async def end_offsets(
        self, partitions: Sequence[TopicPartition], *, isolation: Isolation = "read_committed"
    ) -> dict[TopicPartition, int]:
        """The last stable offset (read_committed) or the high watermark of each."""
        ...

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        """Every committed next offset of a group."""
        ...

    async def topics(self) -> dict[str, TopicDescription]:
        """Every topic that is not internal to Kafka, with the settings that differ from the broker's defaults."""
        ...

    async def create_topic(self, topic: TopicDescription, *, replication_factor: int = 1) -> bool:
        """False where it was there already."""
        ...

    async def alter_topic(self, name: str, configs: Mapping[str, str]) -> None:
        """These become all settings of the topic; those left out go back to the broker's defaults."""
        ...

    async def add_partitions(self, name: str, total: int) -> None:
        """Nothing where so many are there already; `BusError` where there are more."""
        ...

    async def delete_topic(self, name: str) -> None: ...

    async def close(self) -> None:
        """Closes what this bus itself holds; producers and readers are closed by whoever asked for them."""
        ...
