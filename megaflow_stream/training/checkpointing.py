"""Rank 0's checkpoints in the background: upload, move the head, announce, prune.

The training thread copies the state into the one buffer and goes on. Until that copy is stored, which may take as long
as the store is away, further checkpoints that fall due are skipped and counted; their records stay in the lineage of
the next.

    1. Save: chunks, lineage, manifest, head (`checkpoint.writer`). Only then the checkpoint exists.
    2. Announce it on `checkpoints`. A crash before that is healed at the next start: a head that is missing there is
       announced again.
    3. Prune what is not kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from megaflow_stream.bus.api import Bus, json_headers
from megaflow_stream.checkpoint import CheckpointWriter, Head, Snapshot, TensorSpec, prune
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.definitions.trainer import CheckpointEvery
from megaflow_stream.errors import Fenced, MegaflowError
from megaflow_stream.faults import Reach, reach
from megaflow_stream.observe.scan import scan
from megaflow_stream.storage.api import ObjectStore
from megaflow_stream.training.background import Background
from megaflow_stream.training.snapshot import weights_sha256

TOPIC = "checkpoints"
_HEADERS = json_headers("megaflow.checkpoint/1")
RETRY_SECONDS = (0.2, 10.0)

log = logging.getLogger(__name__)


class HeadAppeared(MegaflowError):
    """A job that began without a head has one by now, of an older leader's write that was in flight: the one head that
    could not be taken over (`checkpoint.take_over`). A restart begins at it."""

    retriable = True


@dataclass(frozen=True, slots=True)
class Done:
    """A checkpoint that is stored. uploaded_bytes: what was not there already. seconds: from the copy to the head."""

    head: Head
    weights_sha256: str
    uploaded_bytes: int
    seconds: float


class Checkpointer:
    """Saves one job's checkpoints, one at a time.

    announce: the bus to announce on; None for a replay, which writes nothing to Kafka.
    """

    def __init__(
        self,
        store: ObjectStore,
        announce: Bus | None,
        background: Background,
        writer: CheckpointWriter,
        head: Head | None,
        *,
        every: CheckpointEvery,
        keep: int,
        reach: Reach = reach,
        clock: Clock | None = None,
    ) -> None:
        self.store, self.bus, self.background, self.writer = store, announce, background, writer
        self.head, self.every, self.keep, self.reach = head, every, keep, reach
        self.clock = clock or SystemClock()
        self.skipped = self.saved = 0
        self.last: Done | None = None
        self._saving: Future[Done] | None = None
        self._last_step = head.step if head else 0
        self._last_at = self.clock.monotonic()
        self._missed = 0

    @property
    def busy(self) -> bool:
        """Whether the buffer is still being read. Raises what ended the last save."""
        if self._saving is None:
            return False
        if not self._saving.done():
            return True
        self._collect()
        return False

    def due(self, step: int) -> bool:
        """Whether a checkpoint after `step` is due and can be taken.

        Each that cannot, as the one before is still being stored, is counted as skipped."""
        if step <= self._last_step:
            return False
        due = 0
        if self.every.steps is not None:
            due = (step - self._last_step) // self.every.steps
        if self.every.seconds is not None:
            due = max(due, int((self.clock.monotonic() - self._last_at) / self.every.seconds))
        if not due or not self.busy:
            return due > 0
        if due > self._missed:
            self.skipped += due - self._missed
            self._missed = due
            log.warning("a checkpoint after step %d is skipped: the one before is still being stored", step)
        return False

    def begin(
        self,
        step: int,
        tensors: Sequence[tuple[TensorSpec, memoryview]],
        state: Mapping[str, Any],
        lineage: pa.Table,
        said: Mapping[str, Any],
    ) -> None:
        """Starts to save; `tensors` must not change until `busy` is False.

        said: the announcement, less the manifest."""
        if self.busy:
            raise MegaflowError("a checkpoint is begun while another is being stored", step=step)
        self._last_step, self._last_at, self._missed = step, self.clock.monotonic(), 0
        snapshot = Snapshot(step=step, tensors=tensors, state=state, lineage=lineage)
        self._saving = self.background.submit(self._save(snapshot, dict(said)))

    def finish(self, timeout_seconds: float | None = None) -> None:
        """Waits for the save that is under way. Raises what ended it, or TimeoutError."""
        if self._saving is not None:
            self._collect(timeout_seconds)

    def _collect(self, timeout_seconds: float | None = None) -> None:
        assert self._saving is not None
        self.last = self._saving.result(timeout_seconds)
        self._saving = None
        self.saved += 1

    async def _save(self, snapshot: Snapshot, said: dict[str, Any]) -> Done:
        began = self.clock.monotonic()
        digest = await asyncio.to_thread(weights_sha256, snapshot.tensors)
        state = {**snapshot.state, "weights_sha256": digest}
        snapshot = Snapshot(step=snapshot.step, tensors=snapshot.tensors, state=state, lineage=snapshot.lineage)
        self.reach("rank.before_save", step=snapshot.step)
        wait = RETRY_SECONDS[0]
        while True:
            try:
                self.head = await self.writer.save(snapshot, self.head)
                break
            except Fenced as error:
                if self.head is not None:
                    raise
                raise HeadAppeared("the job has a head that was not there when training began") from error
            except MegaflowError as error:
                if not error.retriable:
                    raise
                log.warning("the checkpoint of step %d is not stored yet, trying again: %s", snapshot.step, error)
            await self.clock.sleep(wait)
            wait = min(wait * 2, RETRY_SECONDS[1])
        done = Done(self.head, digest, self.writer.saved.uploaded_bytes, self.clock.monotonic() - began)
        self.reach("rank.after_save", step=snapshot.step)
        if self.bus is not None:
            await self._announce({**said, "manifest": self.head.manifest, "manifest_sha256": self.head.sha256})
        await self._prune()
        return done

    async def _announce(self, said: Mapping[str, Any]) -> None:
        assert self.bus is not None
        wait = RETRY_SECONDS[0]
        while True:
            try:
                producer = await self.bus.producer()
                try:
                    sent = await producer.send(
                        TOPIC, orjson.dumps(said), key=str(said["job"]).encode(), partition=0, headers=_HEADERS
                    )
                    await sent
                    return
                finally:
                    await producer.close()
            except MegaflowError as error:
                if not error.retriable:
                    raise
                log.warning("a checkpoint is not announced yet, trying again: %s", error)
            await self.clock.sleep(wait)
            wait = min(wait * 2, RETRY_SECONDS[1])

    async def announce_again(self, said: Mapping[str, Any]) -> bool:
        """Announces the head, unless its announcement is there."""
        if self.bus is None or self.head is None:
            return False
        async with aclosing(scan(self.bus, TOPIC)) as records:
            async for record in records:
                try:
                    if orjson.loads(record.value or b"{}").get("manifest") == self.head.manifest:
                        return False
                except (orjson.JSONDecodeError, AttributeError):
                    continue
        await self._announce({**said, "manifest": self.head.manifest, "manifest_sha256": self.head.sha256})
        return True

    async def close(self) -> None:
        """Lets go of S3 and Kafka, in the checkpoint thread's loop."""
        await self.store.close()
        if self.bus is not None:
            await self.bus.close()

    async def _prune(self) -> None:
        """Best effort: a checkpoint is no worse for what lies beside it."""
        if (self.saved + 1) % max(1, self.keep // 2):
            return
        try:
            await prune(self.store, self.writer.job, self.keep, with_lineage=False)
        except MegaflowError as error:
            log.warning("old checkpoints were not pruned: %s", error)
