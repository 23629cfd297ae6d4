"""One node of a trainer group: starts its ranks, watches them, and starts all again from the head when one is lost.

A rank is lost when it exits with an error, or gives no sign of life for the trainer's `rank_timeout_seconds`. Then the
whole group is ended with SIGKILL, which a stopped or stuck process obeys too, and a new generation starts after a
pause that doubles. An error that trying again cannot help (a wrong setting, an expired record, a newer trainer of the
job) ends the job, as do `TRIES` generations that came no further than those before.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.errors import MegaflowError
from megaflow_stream.observe.status import StatusWriter
from megaflow_stream.training.job import Job, Place, to_json
from megaflow_stream.training.progress import Phase, read_sign

TRIES = 5
BACKOFF_SECONDS = (0.5, 10.0)
WATCH_SECONDS = 0.1
START_SECONDS = 300.0  # imports, building the model, restoring: no sign is asked for

Event = Mapping[str, Any]
log = logging.getLogger(__name__)


class TrainingFailed(MegaflowError):
    """The job ended without having been asked to. Its exit code is that of its cause."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def default_ranks() -> int:
    """A rank a GPU; without any, two, or one on a machine of one core."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(glob.glob("/proc/driver/nvidia/gpus/*"))
    if visible is not None:
        gpus = min(gpus, len([d for d in visible.split(",") if d.strip()]))
    return gpus or min(2, len(os.sched_getaffinity(0)))


class _Rank:
    """A started rank."""

    def __init__(self, place: Place, process: Process) -> None:
        self.place, self.process = place, process
        self.started = time.monotonic()
        self.failure: Event | None = None
        self.reading: asyncio.Task[None] | None = None

    def cause(self) -> tuple[int, str, Event]:
        """Why it ended, with a rank of causes: a peer's complaint about others comes last."""
        code = self.process.returncode or 0
        if self.failure is not None:
            order = 2 if self.failure["kind"] == "CollectiveFailed" else 1
            return order, f"rank {self.place.rank}: {self.failure['error']}", self.failure
        if code < 0:
            name = signal.Signals(-code).name
            return 0, f"rank {self.place.rank} was ended by {name}", {}
        return 1, f"rank {self.place.rank} ended with exit code {code}", {}


class Launcher:
    """Runs a job with so many ranks until it ends or is asked to.

    on_event: called with each event of the ranks and of the launcher itself. run_dir: made and removed by default.
    """

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        ranks: int,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        start_seconds: float = START_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self.job, self.trainer, self.world_size, self.on_event = job, trainer, ranks, on_event
        self.start_seconds = start_seconds
        self.clock = clock or SystemClock()
        self.restarts = 0
        self._furthest = -1
        self._stop = asyncio.Event()
        self._ranks: list[_Rank] = []

    def stop(self) -> None:
        """Asks for the end: the step is finished, a last checkpoint is stored. Called from the launcher's loop."""
        self._stop.set()

    def kill(self) -> None:
        """Ends the ranks at once."""
        self._stop.set()
        for rank in self._ranks:
            _kill(rank.process)

    async def run(self) -> None:
        """Returns when the job has ended well. Raises `TrainingFailed`."""
        fruitless = 0
        with TemporaryDirectory(prefix="megaflow-train-") as folder:
            generation = 0
            while True:
                generation += 1
                before = self._furthest
                failure = await self._generation(generation, Path(folder))
                if failure is None:
                    return
                error, cause = failure
                fruitless = 1 if self._furthest > before else fruitless + 1
                if self._stop.is_set() or cause.get("final") or fruitless >= TRIES:
                    if not cause.get("final") and fruitless >= TRIES:
                        error = f"{TRIES} starts came no further than step {max(0, self._furthest)}; the last: {error}"
                    await self._say("failed", error=error[:500])
                    raise TrainingFailed(
                        f"training {self.job.name} failed: {error}",
                        hint=str(cause.get("hint", "")),
                        exit_code=int(cause.get("exit_code", 1)) or 1,
                    )
                self.restarts += 1
                pause = min(BACKOFF_SECONDS[0] * 2 ** (fruitless - 1), BACKOFF_SECONDS[1])
                log.warning("%s; all ranks start again from the last checkpoint in %g s", error, pause)
                self._event("restart", cause=error, generation=generation + 1, pause_seconds=pause)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), pause)
                if self._stop.is_set():
                    await self._say("stopped")
                    return

    async def _generation(self, generation: int, folder: Path) -> tuple[str, Event] | None:
        """None when every rank ended well, else why not."""
        try:
            self._ranks = []
            for n in range(self.world_size):
                place = Place(rank=n, world_size=self.world_size, generation=generation, run_dir=folder)
                self._ranks.append(await self._start(place))
            return await self._watch()
        finally:
            for rank in self._ranks:
                _kill(rank.process)
            for rank in self._ranks:
                await rank.process.wait()
                if rank.reading is not None:
                    await rank.reading

    async def _start(self, place: Place) -> _Rank:
        threads = str(self.trainer.threads_per_rank)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megaflow_stream.training.rank",
            stdin=PIPE,
            stdout=PIPE,
            limit=1 << 20,
            start_new_session=True,  # a Ctrl-C is for the launcher
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )
        assert process.stdin is not None
        process.stdin.write(to_json(self.job, place) + b"\n")
        await process.stdin.drain()
        rank = _Rank(place, process)
        rank.reading = asyncio.create_task(self._read(rank))
        return rank

    async def _read(self, rank: _Rank) -> None:
        assert rank.process.stdout is not None
        async for line in rank.process.stdout:
            try:
                event = orjson.loads(line)
            except orjson.JSONDecodeError:
                event = None
            if not isinstance(event, dict) or "event" not in event:
                sys.stderr.write(line.decode(errors="replace"))  # a library that prints
                continue
            if event["event"] == "failed":
                rank.failure = event
                continue
            if event["event"] == "step":
                self._furthest = max(self._furthest, event["step"])
            self.on_event(event)

    async def _watch(self) -> tuple[str, Event] | None:
        asked: float | None = None
        while True:
            ended = [r for r in self._ranks if r.process.returncode is not None]
            if any(r.process.returncode for r in ended):
                await asyncio.sleep(WATCH_SECONDS)  # the others' ends, and their last words, are on their way
                for r in ended:
                    assert r.reading is not None
                    await r.reading
                if asked is not None and all(r.process.returncode in (0, -signal.SIGTERM) for r in ended):
                    await self._say("stopped")  # it was asked before it could listen: nothing has been trained yet
                    return None
                _, error, cause = min(
                    (r.cause() for r in self._ranks if r.process.returncode), key=lambda found: found[0]
                )
                return error, cause
            if len(ended) == self.world_size:
                return None
            if (silent := self._silent()) is not None:
                return silent, {}
            if self._stop.is_set():
                now = time.monotonic()
                if asked is None:
                    asked = now
                    for r in self._ranks:
                        if r.process.returncode is None:
                            r.process.terminate()
                if now - asked > self.trainer.stop_seconds:
                    return f"the ranks did not end within {self.trainer.stop_seconds:g} s", {
                        "hint": "the steps since the last checkpoint are trained again at the next start; the "
                        "trainer's stop_seconds is how long the last checkpoint may take"
                    }
            await asyncio.sleep(WATCH_SECONDS)

    def _silent(self) -> str | None:
        """The rank that has been silent for longest, if for too long."""
        worst: tuple[float, str] | None = None
        now = time.monotonic()
        for r in self._ranks:
            if r.process.returncode is not None:
                continue
            sign = read_sign(r.place.sign_file)
            if sign is None or sign.phase == Phase.STARTING:
                age, bound, what = now - r.started, self.start_seconds, "did not start"
            else:
                age, bound = now - sign.at, self.trainer.rank_timeout_seconds
                what = f"gave no sign of life in the phase {sign.phase.name.lower()} of step {sign.step}"
            if age > bound and (worst is None or age > worst[0]):
                worst = age, f"rank {r.place.rank} {what} for {age:.0f} s"
        return worst[1] if worst else None

    async def _say(self, state: str, **numbers: object) -> None:
        """The ranks are gone, so the last status is the launcher's to write."""
        if self.job.replay:
            return
        from megaflow_stream.training.lead import component

        try:
            bus = await self.job.bus("launcher")
            try:
                status = StatusWriter(bus, component(self.job.name), "trainer", clock=self.clock)
                async with status:
                    await status.close(state, **numbers)
            finally:
                await bus.close()
        except MegaflowError as unreachable:
            log.warning("the last status could not be written: %s", unreachable)

    def _event(self, event: str, **numbers: object) -> None:
        self.on_event({"event": event, **numbers})


def _kill(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
