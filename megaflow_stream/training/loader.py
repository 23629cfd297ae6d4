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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

import megaflow_stream.bus.kafka  # noqa: F401  for half a second, while a rank starts: not in the reading thread
from megaflow_stream.bus.api import Bus, Reader, Record, TopicPartition
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.errors import BadRecord, Damaged, MegaflowError, SettingError
from megaflow_stream.features import record as features
from megaflow_stream.observe.stall import Stall
from megaflow_stream.training.background import Background
from megaflow_stream.training.plan import Range, Scouted

BUDGET_BYTES = 64 << 20
FETCH_SECONDS = 0.1
FETCH_RECORDS = 1000
RETRY_SECONDS = (0.1, 5.0)
_HEADERS = attrgetter("headers")

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Fetched:
    """Records of one partition that wait to be trained, in offset order, as columns.

    offsets, trainable_tokens: int64 [n]. values: n packed sequences, encoded.
    """

    offsets: NDArray[np.int64]
    trainable_tokens: NDArray[np.int64]
    values: list[bytes]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, part: slice) -> Fetched:
        return Fetched(self.offsets[part], self.trainable_tokens[part], self.values[part])

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.values))


_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class View:
    """What is known of a partition: read up to `position` (past markers), and the records that no plan has claimed."""

    position: int
    records: Scouted


@dataclass(slots=True)
class _Partition:
    """waiting: what each fetch brought, and no plan has claimed."""

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
        self._room = asyncio.Event()
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
            partitions = sorted(self._partitions.items(), key=lambda item: sum(map(len, item[1].waiting)))
            for done, (name, partition) in enumerate(partitions):
                share = max(1, -(-limit // (len(partitions) - done)))
                offsets, trainable, count = [_NONE], [_NONE], 0
                for part in partition.waiting:
                    if count >= share:
                        break
                    offsets.append(part.offsets[: share - count])
                    trainable.append(part.trainable_tokens[: share - count])
                    count += len(offsets[-1])
                limit -= count
                views[name] = View(partition.position, Scouted(np.concatenate(offsets), np.concatenate(trainable)))
            return views

    def want(self, ends: Mapping[TopicPartition, int]) -> None:
        """Reads up to these offsets whatever the budget: a step that was planned by more ranks may need more."""
        with self._lock:
            for name, end in ends.items():
                if name in self._partitions:
                    self._partitions[name].wanted = end
                    self._wake(self._partitions[name])

    def claim(self, planned: Range) -> Fetched:
        """The records of a planned range, taken out of the buffer. Ranges of a partition are claimed in their order.

        Raises `Damaged` where the buffer does not begin with the range: plan and topic do not belong together."""
        with self._lock:
            partition = self._partitions[planned.partition]
            parts: list[Fetched] = []
            waiting = partition.waiting
            while waiting and waiting[0].offsets[0] < planned.end:
                part = waiting.popleft()
                if (count := int(part.offsets.searchsorted(planned.end))) < len(part):
                    waiting.appendleft(part[count:])
                parts.append(part[:count])
            taken = _joined(parts)
            size = taken.nbytes
            partition.waiting_bytes -= size
            self.claimed_bytes += size
            self._wake(partition)
            position = partition.position
        if not len(taken) or taken.offsets[0] != planned.begin or position < planned.end:
            raise Damaged(
                f"the plan's range [{planned.begin}, {planned.end}) is not what the topic holds there"
                f"{f': its next record is at {taken.offsets[0]}' if len(taken) else ''}",
                hint="was the topic deleted and made again? Then its trainers must start under a new name",
                **planned.partition._asdict(),
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
                    self._room.clear()
                    if self._balance(reader):  # asleep, a rank that trains pays nothing for its reader
                        await self._room.wait()
                        stall = Stall(bus, self._clock)
                        continue
                    found = await reader.fetch(timeout_seconds=FETCH_SECONDS, max_records=FETCH_RECORDS)
                    fetched = {name: self._open(records) for name, records in found.items() if records}
                    positions = {name: await reader.position(name) for name in self._partitions}
                    self._keep(fetched, positions)
                    await stall.look({name: at for name, at in positions.items() if not self._partitions[name].paused})
            finally:
                await reader.close()
        finally:
            await asyncio.shield(bus.close())

    def _full(self, partition: _Partition) -> bool:
        limit = self._high_bytes // 2 if partition.paused else self._high_bytes
        return partition.waiting_bytes >= limit and partition.position >= partition.wanted

    def _balance(self, reader: Reader) -> bool:
        """Pauses what has its share, resumes what has room again. Returns whether all is paused."""
        with self._lock:
            for name, partition in self._partitions.items():
                full = self._full(partition)
                if full != partition.paused:
                    (reader.pause if full else reader.resume)(name)
                    partition.paused = full
            return all(partition.paused for partition in self._partitions.values())

    def _wake(self, partition: _Partition) -> None:
        """Under the lock, from the training thread."""
        if partition.paused and not self._full(partition) and self._background is not None:
            self._background.loop.call_soon_threadsafe(self._room.set)

    def _keep(self, fetched: Mapping[TopicPartition, Fetched], positions: Mapping[TopicPartition, int]) -> None:
        with self._lock:
            for name, records in fetched.items():
                partition = self._partitions[name]
                size = records.nbytes
                partition.waiting.append(records)
                partition.waiting_bytes += size
                self.fetched_bytes += size
                self.fetched_records += len(records)
            for name, position in positions.items():
                self._partitions[name].position = position

    def _open(self, records: Sequence[Record]) -> Fetched:
        """What the headers say, so that no value is decoded twice."""
        try:  # as `features.record.headers` writes them, which is a third of a dict's time
            heads = [(a, tokenizer, b, int(count)) for _, _, (a, tokenizer), _, (b, count), _ in map(_HEADERS, records)]
            trainable = [head[3] for head in heads]
            known = {head[:3] for head in heads} == {("tokenizer", self._tokenizer_bytes, "trainable")}
        except ValueError:
            known = False
        if not known:
            trainable = [self._look_at(record, dict(record.headers)) for record in records]
        return Fetched(
            np.array([record.offset for record in records], np.int64),
            np.array(trainable, np.int64),
            [record.value or b"" for record in records],
        )

    def _look_at(self, record: Record, head: Mapping[str, bytes]) -> int:
        """The trainable tokens of a record that may be another producer's: without headers, its value says it too."""
        try:
            if "tokenizer" in head and "trainable" in head:
                tokenizer, trainable = head["tokenizer"].decode(), int(head["trainable"])
            else:
                sequence = features.decode(record.value or b"")
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
        return trainable


def _joined(parts: Sequence[Fetched]) -> Fetched:
    """The records of all parts, which follow each other."""
    if len(parts) == 1:
        return parts[0]
    return Fetched(
        np.concatenate([_NONE, *(p.offsets for p in parts)]),
        np.concatenate([_NONE, *(p.trainable_tokens for p in parts)]),
        [value for p in parts for value in p.values],
    )
