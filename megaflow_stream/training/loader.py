"""Reads the features: each record is fetched from Kafka by one rank, ahead of the plan, within a budget of bytes.

A rank owns a contiguous run of partitions (`plan.owner`), by assign and seek, read_committed, never by a group: what is
read is decided by the plan. It keeps what it has read until the plan names it; `claim` hands out a planned slice. A
slice that another rank trains travels to it by the communicator (`exchange`), so that bytes fetched per byte trained
stay 1 for any number of ranks.

The reader lives in a thread of its own with its own connection. While the broker is away it tries on; a position that
retention has overtaken, or a record of another tokenizer, is an error that the training thread meets at its next look.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

import megaflow_stream.bus.kafka  # noqa: F401  for half a second, while a rank starts: not in the reading thread
from megaflow_stream.bus.api import Bus, Reader, Record, TopicPartition
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.errors import BadRecord, Damaged, MegaflowError, SettingError
from megaflow_stream.features import record as features
from megaflow_stream.observe.stall import Stall
from megaflow_stream.training.background import Background
from megaflow_stream.training.plan import Scouted, Slice

BUDGET_BYTES = 64 << 20
FETCH_SECONDS = 0.1
FETCH_RECORDS = 1000
RETRY_SECONDS = (0.1, 5.0)

log = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """A record that waits to be trained."""

    offset: int
    trainable_tokens: int
    value: bytes


@dataclass(slots=True)
class View:
    """What is known of a partition: read up to `position` (past markers), and the records that no plan has claimed."""

    position: int
    records: Scouted


@dataclass(slots=True)
class _Partition:
    position: int
    waiting: deque[Fetched] = field(default_factory=deque)
    waiting_bytes: int = 0
    paused: bool = False
    wanted: int = 0


class Loader:
    """One rank's reader.

    connect: makes the loader's own bus, on its own loop. tokenizer: SHA-256 in hex that every record must name.
    positions: the partitions to read, from where. budget_bytes: of record values kept; a partition that has its even
        share is paused until half of that is gone.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Bus]],
        positions: Mapping[TopicPartition, int],
        *,
        tokenizer: str,
        budget_bytes: int = BUDGET_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self._connect, self._tokenizer, self._tokenizer_bytes = connect, tokenizer, tokenizer.encode()
        self._clock = clock or SystemClock()
        self._partitions = {p: _Partition(offset) for p, offset in positions.items()}
        self._high_bytes = budget_bytes // max(1, len(positions))
        self._lock = threading.Lock()
        self._error: MegaflowError | None = None
        self.fetched_bytes = self.claimed_bytes = self.fetched_records = 0
        self._background: Background | None = None
        if positions:
            self._background = Background("loader")
            self._background.submit(self._run())

    def look(self, limit: int) -> dict[TopicPartition, View]:
        """What may be planned: `limit` records in all, shared evenly, where what one partition lacks others may use; at
        least the first of each. Raises what ended the reading."""
        with self._lock:
            if self._error is not None:
                raise self._error
            views = {}
            partitions = sorted(self._partitions.items(), key=lambda item: len(item[1].waiting))
            for done, (name, partition) in enumerate(partitions):
                share = max(1, -(-limit // (len(partitions) - done)))
                first = list(islice(partition.waiting, share))
                limit -= len(first)
                offsets = np.array([f.offset for f in first], np.int64)
                views[name] = View(
                    partition.position, Scouted(offsets, np.array([f.trainable_tokens for f in first], np.int64))
                )
            return views

    def want(self, ends: Mapping[TopicPartition, int]) -> None:
        """Reads up to these offsets whatever the budget: a step that was planned by more ranks may need more."""
        with self._lock:
            for name, end in ends.items():
                if name in self._partitions:
                    self._partitions[name].wanted = end

    def claim(self, wanted: Slice) -> list[Fetched]:
        """The records of a planned slice, taken out of the buffer. Slices of a partition are claimed in their order.

        Raises `Damaged` where the buffer does not begin with the slice: plan and topic do not belong together."""
        with self._lock:
            partition = self._partitions[wanted.partition]
            taken: list[Fetched] = []
            waiting = partition.waiting
            while waiting and waiting[0].offset < wanted.end:
                taken.append(waiting.popleft())
            size = sum([len(f.value) for f in taken])
            partition.waiting_bytes -= size
            self.claimed_bytes += size
            position = partition.position
        if not taken or taken[0].offset != wanted.begin or position < wanted.end:
            raise Damaged(
                f"the plan's slice [{wanted.begin}, {wanted.end}) is not what the topic holds there"
                f"{f': its next record is at {taken[0].offset}' if taken else ''}",
                hint="was the topic deleted and made again? Then its trainers must start under a new name",
                topic=wanted.partition.topic,
                partition=wanted.partition.partition,
            )
        return taken

    def close(self) -> None:
        if self._background is not None:
            self._background.close()

    async def _run(self) -> None:
        wait = RETRY_SECONDS[0]
        while True:
            try:
                await self._read()
            except MegaflowError as error:
                if not error.retriable:
                    with self._lock:
                        self._error = error
                    return
                log.warning("reading features is interrupted, trying again: %s", error)
            except Exception as error:
                with self._lock:
                    self._error = MegaflowError(f"reading features failed: {type(error).__name__}: {error}")
                raise
            await self._clock.sleep(wait)
            wait = min(wait * 2, RETRY_SECONDS[1])

    async def _read(self) -> None:
        bus = await self._connect()
        try:
            reader = await bus.reader()
            try:
                for partition in self._partitions.values():
                    partition.paused = False
                reader.assign({name: p.position for name, p in self._partitions.items()})
                stall = Stall(bus, self._clock)
                while True:
                    self._balance(reader)
                    found = await reader.fetch(timeout_seconds=FETCH_SECONDS, max_records=FETCH_RECORDS)
                    fetched = {name: [self._open(r) for r in records] for name, records in found.items()}
                    positions = {name: await reader.position(name) for name in self._partitions}
                    self._keep(fetched, positions)
                    await stall.look({name: at for name, at in positions.items() if not self._partitions[name].paused})
            finally:
                await reader.close()
        finally:
            await asyncio.shield(bus.close())

    def _balance(self, reader: Reader) -> None:
        for name, partition in self._partitions.items():
            full = partition.waiting_bytes >= (self._high_bytes // 2 if partition.paused else self._high_bytes)
            full = full and partition.position >= partition.wanted
            if full != partition.paused:
                (reader.pause if full else reader.resume)(name)
                partition.paused = full

    def _keep(self, fetched: Mapping[TopicPartition, list[Fetched]], positions: Mapping[TopicPartition, int]) -> None:
        with self._lock:
            for name, records in fetched.items():
                partition = self._partitions[name]
                size = sum([len(f.value) for f in records])
                partition.waiting.extend(records)
                partition.waiting_bytes += size
                self.fetched_bytes += size
                self.fetched_records += len(records)
            for name, position in positions.items():
                self._partitions[name].position = position

    def _open(self, record: Record) -> Fetched:
        value = record.value or b""
        said = counted = None
        for name, data in record.headers:
            if name == "tokenizer":
                said = data
            elif name == "trainable":
                counted = data
        try:
            if said is not None and counted is not None:
                trainable = int(counted)
                if said == self._tokenizer_bytes:
                    return Fetched(record.offset, trainable, value)
                tokenizer = said.decode()
            else:  # of another producer: the value says it too
                sequence = features.decode(value)
                tokenizer, trainable = sequence.tokenizer, sequence.trainable
        except ValueError as error:  # BadRecord is one
            raise BadRecord(
                f"a record of the features cannot be trained: {error}",
                hint="what wrote it? Only `megaflow process` and producers of packed sequences write to this topic",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
            ) from error
        if tokenizer != self._tokenizer:
            raise SettingError(
                f"features made with the tokenizer {tokenizer[:12]} meet a trainer with the tokenizer "
                f"{self._tokenizer[:12]}",
                hint="process the conversations again with this trainer's tokenizer, or train with theirs",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
            )
        return Fetched(record.offset, trainable, value)
