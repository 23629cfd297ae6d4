"""A processor's membership in its consumer group: fetches for the partitions that it is given.

Heartbeats are aiokafka's, on this process's event loop, which shares no GIL with a handler. Callbacks only pause and
start tasks. Flow is one decision for each partition, derived again whenever something changes: it reads when it is
ready, its own bytes in flight are under the mark, and the backlog downstream is within its budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from megaflow_stream.bus.api import Bus, GroupReader, TopicPartition
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.errors import BusError, MegaflowError, RecordsExpired, SettingError
from megaflow_stream.processing.batch import Batch
from megaflow_stream.processing.compute import Compute
from megaflow_stream.processing.frames import Answer
from megaflow_stream.processing.liveness import Liveness
from megaflow_stream.processing.partition import Partition

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a worker keeps its membership. Kafka's own names and defaults, in seconds.

    stuck_seconds: a partition with readable records of which no offset moved for so long is told; after twice as long
        in which nothing explains it (see `liveness`) the worker ends.
    """

    session_seconds: float = 10.0
    heartbeat_seconds: float = 3.0
    transaction_timeout_seconds: float = 20.0
    stuck_seconds: float = 60.0
    idle_commit_seconds: float = 0.2


class Member:
    """One worker's part of a processor's group. `run` ends when `stop` is set, or by an error that no retry cures."""

    def __init__(
        self,
        bus: Bus,
        number: int,
        processor: Processor,
        compute: Compute,
        partitions: Mapping[str, int],
        options: Options,
        partition_fetch_bytes: int,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self.bus, self.number, self.processor, self.compute = bus, number, processor, compute
        self.partitions, self.options = partitions, options
        self.partition_fetch_bytes = partition_fetch_bytes
        self.limits = limits or {}  # bytes of a record, by topic, where they are known
        self.parts: dict[TopicPartition, Partition] = {}
        self.reader: GroupReader
        self.leaving = self.held_back = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.records_done = self.transactions = self.rejected = self.dropped = 0
        self.liveness = Liveness(self)

    async def call(self, batch: pa.RecordBatch) -> Answer:
        return await self.compute.call(self.number, batch, self.processor.hang_seconds)

    def keep(self, task: asyncio.Task[None]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def set_flow(self, part: Partition) -> None:
        """Reads the partition, or not: one rule, whatever changed."""
        if part.ready and not part.full and not self.held_back:
            self.reader.resume(part.tp)
        else:
            self._pause(part)

    def _pause(self, part: Partition) -> None:
        with contextlib.suppress(BusError):  # it has just been taken away: its end comes by the callback
            self.reader.pause(part.tp)

    def hold_back(self, held_back: bool) -> None:
        """Backpressure from downstream, for all partitions."""
        if held_back != self.held_back:
            self.held_back = held_back
            log.info("%s %s", self.processor.name, "waits for its readers" if held_back else "goes on")
            for part in self.parts.values():
                self.set_flow(part)

    def committed(self, part: Partition, batches: Sequence[Batch]) -> None:
        self.transactions += 1
        for batch in batches:
            self.records_done += batch.records
            self.rejected += len(batch.rejected)
            self.dropped += len(batch.dropped)

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        for tp in () if self.leaving else partitions:  # an assignment may still come while a worker leaves
            part = self.parts[tp] = Partition(self, tp)
            part.task = asyncio.create_task(part.run(), name=f"{self.processor.name}-{tp.partition}")
            part.task.add_done_callback(self._ended)

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        parts = [self.parts.pop(tp) for tp in list(self.parts)]
        await asyncio.gather(*(part.give_up() for part in parts), return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.failure.set_exception(error)

    async def run(self, stop: asyncio.Event) -> None:
        self.reader = await self.bus.group_reader(
            self.processor.group,
            [self.processor.source],
            self,
            session_seconds=self.options.session_seconds,
            heartbeat_seconds=self.options.heartbeat_seconds,
            partition_fetch_bytes=self.partition_fetch_bytes,
        )
        try:
            await self._fetches(stop)
            await asyncio.sleep(0)
        finally:
            await self._leave()
        if self.failure.done():
            self.failure.result()

    async def _fetches(self, stop: asyncio.Event) -> None:
        checked, wait_seconds, failures = time.monotonic(), 0.1, 0
        while not stop.is_set() and not self.failure.done():
            try:
                fetched = await self.reader.fetch(timeout_seconds=0.1, max_records=self.processor.batch_records)
                # No await between the fetch and here: a position then covers only what was put.
                for tp, records in fetched.items():
                    if (part := self.parts.get(TopicPartition(*tp))) is not None:
                        part.put(records)
                await asyncio.sleep(0)  # what is buffered comes at once: the partitions' tasks must have their turn
                if time.monotonic() - checked > self.options.idle_commit_seconds:
                    checked = time.monotonic()
                    for part in [p for p in self.parts.values() if p.ready and not p.bytes_in_flight]:
                        part.idle(await self.reader.position(part.tp))
                wait_seconds, failures = 0.1, 0
            except (RecordsExpired, SettingError):
                raise
            except MegaflowError as error:
                failures += 1
                if not failures & (failures - 1):
                    log.warning("%s: %s", self.processor.name, error)
                await asyncio.sleep(wait_seconds)
                wait_seconds = min(2 * wait_seconds, 2.0)

    async def _leave(self) -> None:
        """In order: read no more, commit what is computed, leave the group (not by waiting for the session's end)."""
        self.leaving = True
        for part in self.parts.values():
            self._pause(part)
        deadline = time.monotonic() + 2 * self.processor.commit_interval_seconds + 1.0
        while any(part.pending for part in self.parts.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.on_revoked(list(self.parts))
        await self.reader.close()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=6.0)
