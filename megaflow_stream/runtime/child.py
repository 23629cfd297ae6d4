"""One process of a run: started with its log in a file, started again when it ends, with backoff.

A component that ends again and again soon after its start ends the run, with its last words as the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_stream.errors import MegaflowError
from megaflow_stream.runtime.lifeline import Lifeline

log = logging.getLogger(__name__)

_SHORT_LIFE_SECONDS = 60.0
_UNREACHABLE = 3  # exit status: a service does not answer
_SHORT_LIVES = 5
_KILLS = 20
_TOLD = (-signal.SIGTERM, -signal.SIGINT, 130)  # 130: before it knew how to end in order
_LONGEST_WAIT_SECONDS = 8.0
_LAST_LINES = 15


async def never() -> bool:
    return False


class CrashLoop(MegaflowError):
    """A component ended again and again: its cause is the message."""


@dataclass(kw_only=True)
class Child:
    """A `megaflow` command that is to run as long as the run does.

    name: its component in status. arguments: of `megaflow`. lifeline: by which it notices that the run is gone.
    ended: called at each end with (name, exit status).
    finished: asked after an end with status 0: whether nothing is left for it to do, ever.
    """

    name: str
    arguments: Sequence[str]
    log_path: Path
    lifeline: Lifeline
    ended: Callable[[str, int], None] = lambda name, status: None
    finished: Callable[[], Awaitable[bool]] = never
    restarts: int = 0
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)
    stopping: bool = False

    async def run(self) -> None:
        """Until `stop`, or until its work is finished. Raises `CrashLoop`, also where a child says that it is
        misconfigured (exit status 2)."""
        short_lives, kills, wait_seconds = 0, 0, 0.5
        while not self.stopping:
            begun = time.monotonic()
            status = await self._once()
            if self.stopping:
                return
            if status == 0 and await self.finished():
                log.info("%s has finished", self.name)
                return
            self.ended(self.name, status)
            if status == 2:
                raise CrashLoop(f"{self.name} refuses to start:\n{self.last_words()}", log=self.log_path)
            # Being told to end is no fault of the component's, nor is a broker that is away. SIGKILL may be: the kernel
            # sends it where memory runs out.
            if time.monotonic() - begun > _SHORT_LIFE_SECONDS or status in _TOLD:
                short_lives, kills, wait_seconds = 0, 0, 0.5
            elif status == -signal.SIGKILL:
                short_lives, kills, wait_seconds = 0, kills + 1, 0.5
            elif status != _UNREACHABLE:
                short_lives += 1
            if short_lives >= _SHORT_LIVES or kills >= _KILLS:
                count = max(short_lives, kills)
                raise CrashLoop(
                    f"{self.name} ended {count} times within {_SHORT_LIFE_SECONDS:.0f} s of its start, "
                    f"the last time with status {status}:\n{self.last_words()}",
                    log=self.log_path,
                )
            log.warning("%s ended with status %d: started again in %.1f s", self.name, status, wait_seconds)
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 2, _LONGEST_WAIT_SECONDS)
            self.restarts += 1

    async def _once(self) -> int:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "megaflow_stream.cli.main",
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is the supervisor's
                **self.lifeline.spawn_options(),
            )
        return await self.process.wait()

    def stop(self) -> None:
        self.stopping = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """The child and what it started: they share a session."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def last_words(self) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        return "(it left no log)"
