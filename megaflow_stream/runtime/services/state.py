"""What later commands must know of a project's services: `.megaflow/services.json`, and the lock around it.

Whoever changes anything holds the lock; the file is replaced whole, so it is read without the lock too.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from megaflow_stream.errors import MegaflowError

FILE = "services.json"
LOCK = "services.lock"
LOCK_SECONDS = 300.0  # a first start may be downloading
CLOCK_STEP_SECONDS = 2.0  # start times are derived from the wall clock, which may be set


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A command that uses the services: known again by pid and start time (seconds since the epoch)."""

    pid: int
    started: float

    @classmethod
    def me(cls) -> User:
        return cls(pid=os.getpid(), started=psutil.Process().create_time())

    def is_alive(self) -> bool:
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < CLOCK_STEP_SECONDS
        except psutil.Error:
            return False


@dataclass(kw_only=True, slots=True)
class Instance:
    """One service. pid None: it was stopped on purpose. `started` is in seconds since the epoch."""

    pid: int | None = None
    started: float = 0.0
    ports: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class State:
    """keep: `services up` was said. Without it the services end with the last of their users.

    stops: how often they were stopped on purpose.
    """

    keep: bool = False
    stops: int = 0
    kafka_memory_bytes: int = 512 << 20
    users: list[User] = field(default_factory=list)
    services: dict[str, Instance] = field(default_factory=dict)

    def save(self, state_dir: Path) -> None:
        temporary = state_dir / f".{FILE}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")
        os.replace(temporary, state_dir / FILE)


def load(state_dir: Path) -> State:
    """An empty state where nothing was started yet, and where the file cannot be read: processes are found by their
    arguments, so what is lost with it is the memory of their ports."""
    try:
        found = json.loads((state_dir / FILE).read_text("utf-8"))
        return State(
            keep=bool(found["keep"]),
            stops=int(found["stops"]),
            kafka_memory_bytes=int(found["kafka_memory_bytes"]),
            users=[User(**user) for user in found["users"]],
            services={name: Instance(**instance) for name, instance in found["services"].items()},
        )
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return State()


@asynccontextmanager
async def locked(state_dir: Path, say: Callable[[str], None]) -> AsyncIterator[State]:
    """The state, held by one command of the project at a time; the kernel frees it when that command dies."""
    state_dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        begun, said = time.monotonic(), False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - begun
                if waited > LOCK_SECONDS:
                    raise MegaflowError(
                        f"another command has been starting or stopping this project's services for {waited:.0f} s",
                        hint="look for it with `ps`, end it, and try again",
                        file=str(state_dir / LOCK),
                    ) from None
                if waited > 2 and not said:
                    say("another command is starting or stopping this project's services: waiting for it")
                    said = True
                await asyncio.sleep(0.05)
        yield load(state_dir)
    finally:
        os.close(handle)
