"""What rank 0 has beside a rank: the leader, the checkpointer, status; each in the background."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from megaflow_stream.bus.api import Bus
from megaflow_stream.checkpoint import CheckpointWriter, take_over
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.errors import MegaflowError
from megaflow_stream.faults import Reach, reach
from megaflow_stream.observe.status import StatusWriter
from megaflow_stream.storage.api import ObjectStore
from megaflow_stream.training.background import Background
from megaflow_stream.training.checkpointing import Checkpointer
from megaflow_stream.training.job import Job
from megaflow_stream.training.leader import Leader
from megaflow_stream.training.restore import Begin, read_begin

if TYPE_CHECKING:
    from megaflow_stream.training.loop import Rank

log = logging.getLogger(__name__)

Emit = Callable[[str, Mapping[str, Any]], None]
CLOSE_SECONDS = 5.0


def component(job: str) -> str:
    """The trainer's name on `status`."""
    return f"trainer/{job}"


class Lead:
    """Opens all of it, gives it to the rank, closes it."""

    def __init__(
        self, job: Job, trainer: Trainer, tokenizer: str, emit: Emit, reach: Reach = reach, clock: Clock | None = None
    ) -> None:
        self.job, self.trainer, self.tokenizer, self.emit, self.reach = job, trainer, tokenizer, emit, reach
        self.clock = clock or SystemClock()
        self._planning, self._saving = Background("leader"), Background("checkpoints")
        self._status: StatusWriter | None = None
        self._waiting: str | None = None
        self._bus: Bus | None = None
        self._checkpointer: Checkpointer | None = None
        self.leader: Leader | None = None

    def open(self, seconds: float) -> None:
        """Tries for `seconds` while a service does not answer; fences older leaders."""
        deadline = time.monotonic() + seconds
        for background, opening in ((self._planning, self._open_leader), (self._saving, self._open_checkpointer)):
            while True:
                try:
                    background.call(opening())
                    break
                except MegaflowError as error:
                    if not error.retriable or time.monotonic() > deadline:
                        raise
                    log.warning("waiting for a service: %s", error)
                    time.sleep(1.0)

    async def _open_leader(self) -> None:
        job, trainer = self.job, self.trainer
        async with AsyncExitStack() as failed:
            bus = await job.bus("leader")
            failed.push_async_callback(bus.close)
            leader = Leader(
                bus, trainer, self._planning, reach=self.reach, replay=job.replay, gates=job.gates, clock=self.clock
            )
            failed.push_async_callback(leader.close)
            # Both before the head is read: what an older leader is still writing to the plan's log or the head, also a
            # write that is in flight from one that was killed, fails from now on. A replay has a chain of its own.
            await leader.fence()
            store = await job.store()
            try:
                if not job.replay:
                    await take_over(store, job.store_name, secrets.token_hex(8))
                begin: Begin = await read_begin(store, bus, trainer, job.store_name, fresh=job.replay)
            finally:
                await store.close()
            await leader.open(begin.step, begin.plan_cursor, begin.offsets)
            if not job.replay:
                self._status = StatusWriter(bus, component(job.name), "trainer", clock=self.clock)
                await self._status.__aenter__()
            self.leader, self.begin, self._bus = leader, begin, bus
            failed.pop_all()

    async def _open_checkpointer(self) -> None:
        async with AsyncExitStack() as failed:
            store = await self.job.store()
            failed.push_async_callback(store.close)
            bus = None if self.job.replay else await self.job.bus("checkpoints")
            if bus is not None:
                failed.push_async_callback(bus.close)
            await self._make_checkpointer(store, bus)
            failed.pop_all()

    async def _make_checkpointer(self, store: ObjectStore, bus: Bus | None) -> None:
        job, trainer = self.job, self.trainer
        definition = {
            "tokenizer": self.tokenizer,
            "trainer": hashlib.sha256(job.definition.read_bytes()).hexdigest(),
        }
        writer = CheckpointWriter(store, job.store_name, definition=definition, clock=self.clock)
        self._checkpointer = Checkpointer(
            store,
            bus,
            self._saving,
            writer,
            self.begin.head,
            every=job.checkpoint or trainer.checkpoint,
            keep=trainer.keep_checkpoints,
            reach=self.reach,
            clock=self.clock,
        )
        if bus is not None and self.begin.state:
            from megaflow_stream.training.loop import announcement

            said = announcement(job.name, self.begin.state, int(self.clock.now() * 1000))
            if await self._checkpointer.announce_again(said):
                log.warning("the checkpoint of step %d had not been announced: done now", self.begin.step)

    @property
    def checkpointer(self) -> Checkpointer:
        assert self._checkpointer is not None, "open first"
        return self._checkpointer

    def report(self, event: str, numbers: Mapping[str, Any]) -> None:
        """An event goes to the launcher and, as state and numbers, to status. Never waits."""
        waiting = numbers.get("waiting_for") if event == "waiting" else None
        if event != "idle" and (waiting is None or waiting != self._waiting):
            self.emit(event, numbers)
        self._waiting = waiting if event in ("waiting", "idle", "step") else self._waiting
        if self._status is None:
            return
        if event in ("idle", "waiting"):
            self._status.put(event, step=numbers["step"], waiting_for=waiting)
        elif event == "checkpoint":
            numbers = {"checkpoint_step": numbers["step"], **{k: v for k, v in numbers.items() if k != "step"}}
            self._status.put(self._status.state, **numbers)
        elif event == "drained":
            self._status.put(self._status.state, drained=numbers["drain"])
        else:
            self._status.put("running", waiting_for=self._waiting, **numbers)

    def say_stopped(self, rank: Rank) -> None:
        """The last event of a job that ended well, after its last checkpoint."""
        from megaflow_stream.training.snapshot import SnapshotBuffer, state_tensors, weights_sha256

        tensors = SnapshotBuffer().copy(state_tensors(rank.model, rank.optimizer, rank.trainer.trainable))
        self.emit(
            "stopped",
            {
                "step": rank.step,
                "weights_sha256": weights_sha256(tensors),
                "loss": rank.totals.last_loss,
                "checkpoints": self.checkpointer.saved,
                "checkpoints_skipped": self.checkpointer.skipped,
                "snapshot_seconds": round(rank.times.snapshots, 4),
                "step_seconds": round(rank.times.steps, 3),
                "data_wait": round(rank.times.data_wait_share, 5),
            },
        )
        if self._status is not None:
            self._planning.call(self._status.close("stopped"))
            self._status = None

    def close(self) -> None:
        """Lets go of Kafka and S3, bounded. A status that has not said its end yet stays as it is."""
        with contextlib.suppress(MegaflowError, TimeoutError):
            self._planning.call(self._close_planning(), CLOSE_SECONDS * 3)
        with contextlib.suppress(MegaflowError, TimeoutError):
            self._saving.call(self._close_saving(), CLOSE_SECONDS)
        self._planning.close()
        self._saving.close()

    async def _close_planning(self) -> None:
        status, self._status = self._status, None
        if status is not None:
            await status.close("failed")
        if self.leader is not None:
            await self.leader.close()
        if self._bus is not None:
            await self._bus.close()

    async def _close_saving(self) -> None:
        if self._checkpointer is not None:
            await self._checkpointer.close()
