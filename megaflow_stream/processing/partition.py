"""One input partition in the hands of one worker: its producer, state, queue, and the order of its steps.

The order is everything:

    1. pause               nothing of this partition is taken
    2. InitProducerId      fences the older owner; its open transaction has ended when this returns
    3. committed()         only now: before it, the old owner could still have committed past the answer
    4. restore the state   read_committed, to the end offset
    5. seek, drop          what was fetched before the seek is not taken
    6. resume

and any error throws producer, queue and memory away and begins again at 1. A crash before a commit leaves the
transaction open until 2 of the next owner ends it; after a commit, outputs, dead letters, changelog, statistics and
offsets are all there.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaflow_stream.bus.api import OutRecord, Producer, Record, TopicPartition
from megaflow_stream.errors import BusError, Damaged, Fenced, MegaflowError, RecordsExpired, SettingError
from megaflow_stream.faults import reach
from megaflow_stream.observe.lag import record_bytes
from megaflow_stream.processing.attempts import attempt
from megaflow_stream.processing.batch import Batch
from megaflow_stream.processing.compute import HandlerNotStarted
from megaflow_stream.processing.dedup_state import DedupState, restore

if TYPE_CHECKING:
    from megaflow_stream.processing.member import Member

log = logging.getLogger(__name__)

_RECORD_BYTES = 100  # what a record without a value takes in memory: never nothing
_COMMIT_GRACE_SECONDS = 10.0


class OffsetsLost(MegaflowError):
    """The group has no offset where its state says that it had one: every record would be processed again."""


@dataclass(slots=True)
class Fetched:
    """Records that one fetch brought, and when."""

    records: Sequence[Record]
    size_bytes: int
    at: float


class Partition:
    """The life of one assignment. `run` ends only by cancellation, or by an error that no retry can cure."""

    def __init__(self, member: Member, tp: TopicPartition) -> None:
        self.member, self.processor, self.tp = member, member.processor, tp
        self.task: asyncio.Task[None] | None = None
        self.moves = 0  # transactions of this assignment, through all that was thrown away
        self.trouble = ""  # the last thing that went wrong since the last of them
        self._restored = 0
        self.broken = asyncio.Event()
        self.producer: Producer | None = None
        self.committing = asyncio.Lock()
        self.reset()

    def reset(self) -> None:
        self.ready = self.calling = False
        self.state: DedupState | None = None
        self.next_offset = self.covered = self.committed = 0
        self.bytes_in_flight, self.full = 0, False
        self.queue: collections.deque[Fetched] = collections.deque()
        self.arrived = asyncio.Event()
        self.pending: list[Batch] = []
        self.due = asyncio.Event()
        self.idle_position: int | None = None
        self.broken.clear()

    async def start(self) -> None:
        member, tp = self.member, self.tp
        member.reader.pause(tp)  # 1
        self.reset()
        reach("worker.before_init", processor=self.processor.name, partition=tp.partition)
        self.producer = await member.bus.producer(  # 2
            f"{self.processor.group}.{tp.topic}.{tp.partition}",
            transaction_timeout_seconds=member.options.transaction_timeout_seconds,
        )
        reach("worker.after_init", processor=self.processor.name, partition=tp.partition)
        offset = await member.reader.committed(tp)  # 3
        begin = (await member.bus.begin_offsets([tp]))[tp]
        known = offset is not None
        if offset is None:
            offset = begin
        elif offset < begin:
            raise RecordsExpired(
                f"the committed offset {offset} of {self.processor.group} is older than the first retained, {begin}",
                hint="records between the two are gone; move the group's offset on purpose to go on without them",
                topic=tp.topic,
                partition=tp.partition,
            )
        if self.processor.state is not None:  # 4
            self.state = DedupState()
            await restore(member.bus, TopicPartition(self.processor.state.changelog, tp.partition), self.state)
            if not known and self.state:
                raise self._lost(self.processor.state.changelog, self.state)
        self.next_offset = self.covered = self.committed = offset
        member.reader.seek(tp, offset)  # 5
        self.ready = True
        member.set_flow(self)  # 6
        log.info(
            "%s %s/%d from offset %d%s%s",
            self.processor.name,
            tp.topic,
            tp.partition,
            offset,
            "" if known else ", the first there is: nothing was committed",
            f", {len(self.state)} keys restored" if self.state is not None else "",
        )

    def _lost(self, changelog: str, state: DedupState) -> OffsetsLost:
        return OffsetsLost(
            f"{self.processor.group} has no committed offset, and its state was made before offset {state.end}",
            hint=f"all would be processed again. Give the group that offset: kafka-consumer-groups.sh --reset-offsets "
            f"--to-offset {state.end}; or, to process all again, delete the records of {changelog}. A broker forgets "
            f"the offsets of a group without workers after its offsets.retention.minutes",
            topic=self.tp.topic,
            partition=self.tp.partition,
        )

    def progress(self) -> int:
        """Grows with each transaction, and while the state is read for the first time."""
        if not self.ready and self.state is not None:
            self._restored = max(self._restored, self.state.written)
        return self.moves + self._restored

    def put(self, records: Sequence[Record]) -> None:
        """Takes what a fetch brought, unless it was fetched before the seek.

        Records that come twice are not taken: nobody knows what else of the client's is wrong, so all begins again."""
        if not self.ready or not records:
            return
        if records[0].offset < self.next_offset:
            log.warning("%s/%d: offset %d came after %d", *self.tp, records[0].offset, self.next_offset)
            self.ready = False
            self.broken.set()
            return
        self.next_offset = records[-1].offset + 1
        self.idle_position = None
        size = sum(map(record_bytes, records)) + _RECORD_BYTES * len(records)
        self.bytes_in_flight += size
        self.queue.append(Fetched(records, size, time.monotonic()))
        self.arrived.set()
        if self.bytes_in_flight > self.processor.high_bytes:
            self.full = True
            self.member.set_flow(self)

    def idle(self, position: int) -> None:
        """Nothing is in flight and the reader stands at `position`: past markers, which is worth committing."""
        if not self.bytes_in_flight and not self.pending and position > max(self.committed, self.next_offset - 1):
            self.idle_position = position
            self.due.set()

    async def _breaks(self) -> None:
        await self.broken.wait()
        raise BusError("records came twice", topic=self.tp.topic, partition=self.tp.partition)

    async def run(self) -> None:
        pause_seconds, failures, moves = 0.2, 0, 0
        while True:
            try:
                await self.start()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._process())
                    group.create_task(self._commits())
                    group.create_task(self._breaks())
            except* (RecordsExpired, OffsetsLost, Damaged, SettingError, HandlerNotStarted):
                raise
            except* Exception as errors:
                self.ready = False
                causes = list(_leaves(errors))
                if self.moves > moves:
                    pause_seconds, failures, moves = 0.2, 0, self.moves
                failures += 1
                self.trouble = _told(causes[0])
                # The 1st, 2nd, 4th, 8th: a broker that is away for an hour fills no log.
                if not failures & (failures - 1):
                    again = f" ({failures} times now)" if failures > 1 else ""
                    log.warning("%s %s/%d thrown away%s: %s", self.processor.name, *self.tp, again, self.trouble)
                await self.close()
                # Fenced: either this worker is a zombie, and the next heartbeat revokes the partition, or its
                # transaction was timed out. It must not fence the rightful owner: a heartbeat comes first.
                fenced = any(isinstance(cause, Fenced) for cause in causes)
                await asyncio.sleep(1.5 * self.member.options.heartbeat_seconds if fenced else pause_seconds)
                pause_seconds = min(pause_seconds * 2, 5.0)

    async def _take(self) -> tuple[list[Record], int]:
        """The next batch: full, or as old as the linger allows."""
        processor = self.processor
        records: list[Record] = []
        size = 0
        begun = 0.0
        while True:
            if not self.queue:
                self.arrived.clear()
                if not records:
                    await self.arrived.wait()
                else:
                    left = begun + processor.linger_seconds - time.monotonic()
                    # A full queue is paused: nothing more will come before this batch is done.
                    if left <= 0 or self.full:
                        return records, size
                    try:
                        await asyncio.wait_for(self.arrived.wait(), left)
                    except TimeoutError:
                        return records, size
            fetched = self.queue.popleft()
            if not records:
                begun = fetched.at
            records.extend(fetched.records)
            size += fetched.size_bytes
            if (
                len(records) >= processor.batch_records
                or size >= processor.batch_bytes
                or (not processor.linger_seconds)
            ):
                return records, size

    async def _process(self) -> None:
        while True:
            records, size = await self._take()
            batch = Batch(begin=self.covered, end=records[-1].offset + 1, size_bytes=size, records=len(records))
            self.covered = batch.end
            if self.state is None:
                await self._call(batch, records)
            else:
                entries = b""
                keep, duplicates = self.state.fresh(records)
                while keep:
                    await self._call(batch, keep)
                    rejected = {record.offset for record, _, _ in batch.rejected}
                    entries += self.state.entries(keep, rejected)
                    # The copies of a rejected record have waited for it.
                    keep, duplicates = self.state.fresh(duplicates) if rejected else ([], duplicates)
                batch.duplicates(duplicates)
                batch.changelog = self.state.logged(entries, batch.end)
            self.pending.append(batch)
            self.due.set()

    async def _call(self, batch: Batch, records: Sequence[Record]) -> None:
        self.calling = True
        try:
            outcomes = await attempt(self.member, self.processor, self.tp, records)
        finally:
            self.calling = False
        for rows, answer, error in outcomes:
            if answer is not None:
                batch.add(answer, rows)
            else:
                batch.reject(rows[0], error, self.processor.tries)

    async def _commits(self) -> None:
        """One transaction an interval, begun only after the handlers of its batches have returned."""
        processor, begun = self.processor, 0.0
        # Afterwards the broker has aborted it anyway.
        bound_seconds = self.member.options.transaction_timeout_seconds + _COMMIT_GRACE_SECONDS
        while True:
            await self.due.wait()
            while (left := begun + processor.commit_interval_seconds - time.monotonic()) > 0:
                if sum(batch.size_bytes for batch in self.pending) >= processor.transaction_bytes:
                    break
                await asyncio.sleep(min(left, 0.02))
            async with self.committing, asyncio.timeout(bound_seconds):
                begun = time.monotonic()
                batches, self.pending = self.pending, []
                position, self.idle_position = self.idle_position, None
                self.due.clear()
                if batches:
                    await self._commit(batches, batches[-1].end)
                elif position is not None:
                    await self._commit([], position)
            self.member.committed(self, batches)
            self.bytes_in_flight -= sum(batch.size_bytes for batch in batches)
            if self.full and self.bytes_in_flight <= processor.low_bytes:
                self.full = False
                self.member.set_flow(self)

    async def _commit(self, batches: Sequence[Batch], next_offset: int) -> None:
        producer, tp, name = self.producer, self.tp, self.processor.name
        assert producer is not None
        await producer.begin()
        sent: list[asyncio.Future[object]] = []
        out: dict[tuple[str, int], list[OutRecord]] = {}
        for batch in batches:
            made = batch.outputs(self.processor, tp, self.member.partitions, self.member.limits)
            for (topic, partition), records in made.items():
                out.setdefault((topic, partition), []).extend(records)
        for (topic, partition), records in out.items():
            sent += await producer.send_many(topic, partition, records)
        reach("worker.before_offsets", processor=name, partition=tp.partition)
        await producer.send_offsets(self.processor.group, {tp: next_offset})
        reach("worker.before_commit", processor=name, partition=tp.partition)
        await producer.commit(sent)
        reach("worker.after_commit", processor=name, partition=tp.partition)
        self.committed = next_offset
        self.moves += 1
        self.trouble = ""

    async def give_up(self) -> None:
        """Lets a running transaction end, throws the rest away. Bounded: a revoke waits for it."""
        self.ready = False
        try:
            await asyncio.wait_for(self.committing.acquire(), 2.0)
        except TimeoutError:
            log.warning("%s %s/%d: its transaction does not end", self.processor.name, *self.tp)
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task], timeout=5.0)
        await self.close()

    async def close(self) -> None:
        producer, self.producer = self.producer, None
        if producer is not None:  # it may wait for its sender: not here
            self.member.keep(asyncio.create_task(producer.close()))


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _leaves(error: BaseException) -> Sequence[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
