"""A processor: a function from an Arrow RecordBatch to RecordBatches, declared with its source and sinks.

The engine calls a handler with a RecordBatch of one partition's records, in order, none skipped, none repeated:

    offset     int64
    timestamp  int64, milliseconds since the epoch
    key        binary, may be null
    value      binary, may be null
    header:N   binary, may be null: one column for each name in `Processor.headers`

and takes a `Result`. A handler never sees Kafka. It runs in a process of its own, which may be killed at any time:
what it keeps between batches must be a cache, never a count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Sink:
    """A topic that a processor writes.

    topic: its name, or a family of them: `features.{dataset}` is written by the outputs named `features.agent`, ...
    format: `records`: each row of the output batch is a Kafka record (columns `value`, and optionally `key` and
        `header:NAME`, all binary or string). `arrow`: the batch itself is one Kafka record, an Arrow IPC stream.
    partition: `input`: the same number as the input partition, in order. `key`: by the hash of the key.
    headers: written on each record of the sink.
    """

    topic: str
    format: Literal["records", "arrow"] = "records"
    partition: Literal["input", "key"] = "input"
    headers: Mapping[str, str] = field(default_factory=dict)


class Dropped(NamedTuple):
    """A record that a handler left out on purpose: counted by reason, written to the topic of dropped records."""

    offset: int
    conversation: str
    reason: str


class Rejected(NamedTuple):
    """A record that a handler could not process: it goes to the dead-letter topic as it came."""

    offset: int
    error: str
    conversation: str = ""


class Statistic(NamedTuple):
    """Counts of one batch for one dataset and producer, for the statistics agent. Quantities by name."""

    dataset: str
    producer: str
    counts: Mapping[str, int]


@dataclass(kw_only=True)
class Result:
    """What a handler made of a batch: for each sink's topic a RecordBatch, and what became of the other records."""

    outputs: Mapping[str, pa.RecordBatch] = field(default_factory=dict)
    dropped: Sequence[Dropped] = ()
    rejected: Sequence[Rejected] = ()
    statistics: Sequence[Statistic] = ()


Handler = Callable[[pa.RecordBatch], Result]


@dataclass(frozen=True, kw_only=True)
class Deduplicate:
    """Drops records whose key was seen before on the partition; the topic is keyed by a hash of the content.

    The state holds, for each 16-byte key, the offset that brought it first: a record read again from that very offset
    is a redelivery, not a duplicate, and passes. It is backed by the topic `changelog`, written in the same
    transactions, with as many partitions as the source.
    """

    changelog: str


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """Backpressure from downstream: pause while `group` is further behind on `topic` than `high_bytes`, until it is
    within `low_bytes`. A trainer's group is `megaflow.train.NAME`; its position is its plan cursor."""

    topic: str
    group: str
    high_bytes: int
    low_bytes: int


@dataclass(frozen=True, kw_only=True)
class Processor:
    """One step of the stream: source topic, handler, sinks.

    build: called once in the compute process; returns the handler. It is named by the module that declares the
        processor, so that it can be built there again: a module-level function or a frozen dataclass instance.
    headers: names of input headers that become columns.
    batch_records, batch_bytes: a batch is handed over when it has either, or when its first record is older than
        `linger_seconds` (0: whatever one fetch brought).
    commit_interval_seconds, transaction_bytes: a transaction holds whole batches, and ends after either.
    hang_seconds: CPU seconds (wall seconds: ten times as many) after which a handler is killed; then its records are
        tried alone.
    tries: how often a record that kills or fails its handler alone is tried before it is dead-lettered.
    high_bytes, low_bytes: input bytes in flight for one partition at which it is paused and resumed.
    """

    name: str
    source: str
    build: Callable[[], Handler]
    sinks: Sequence[Sink]
    headers: Sequence[str] = ()
    state: Deduplicate | None = None
    dead_letters: str = "dlq"
    dropped: str = "conversations.dropped"
    statistics: str = "processing.statistics"
    batch_records: int = 2000
    batch_bytes: int = 8 << 20
    linger_seconds: float = 0.0
    commit_interval_seconds: float = 0.1
    transaction_bytes: int = 8 << 20
    hang_seconds: float = 120.0
    tries: int = 3
    high_bytes: int = 32 << 20
    low_bytes: int = 8 << 20
    backlog: Backlog | None = None

    @property
    def group(self) -> str:
        """The consumer group that holds this processor's position."""
        return f"megaflow.process.{self.name}"
