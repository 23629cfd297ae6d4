"""A service's process: started as a daemon of the project, believed only on sight, ended within a bound.

A pid alone proves nothing: the kernel gives it to somebody else later. A process is the project's only if its own
arguments name the project's data folder (`marker`), which holds after a lost state file too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LOG_LIMIT_BYTES = 8 << 20
_spawned: set[int] = set()  # our own children: only these may be reaped here


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How to start a service. `marker` is one of the arguments, word for word, and no other project's."""

    argv: Sequence[str]
    marker: str
    cwd: Path
    log: Path
    environment: Mapping[str, str]


def spawn(launch: Launch) -> int:
    """Starts the process in a session of its own, its output appended to the log; returns its pid.

    It has none of our descriptors, and default signals: Ctrl-C at our terminal is not for it."""
    launch.cwd.mkdir(parents=True, exist_ok=True)
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if launch.log.stat().st_size > LOG_LIMIT_BYTES:
            os.replace(launch.log, launch.log.with_suffix(".log.1"))
    # posix_spawn has no working folder: a shell changes to it and becomes the program, under the same pid.
    pid = os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", 'cd "$0" && exec "$@"', str(launch.cwd), *launch.argv],
        {**os.environ, **launch.environment},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(launch.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGQUIT],
    )
    _spawned.add(pid)
    return pid


def is_alive(pid: int, marker: str) -> bool:
    """Whether that pid is a live process of the project's. Ours that ended is reaped by the way."""
    if pid in _spawned:
        try:
            gone = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            gone = True
        if gone:
            _spawned.discard(pid)
        return not gone  # a child that nobody has reaped keeps its pid
    return _has_marker(pid, marker)


def find(marker: str) -> list[int]:
    """Every live process whose arguments have the marker: also one that no state file knows."""
    return [pid for pid in psutil.pids() if pid != os.getpid() and _has_marker(pid, marker)]


async def end(pid: int, marker: str, *, grace_seconds: float) -> bool:
    """SIGTERM, and SIGKILL after the grace; returns once the process is gone. False where it took SIGKILL."""
    deadline = time.monotonic() + grace_seconds
    if _signal(pid, marker, signal.SIGTERM):
        _signal(pid, marker, signal.SIGCONT)  # a stopped process would not hear SIGTERM
    killed = False
    while is_alive(pid, marker):
        if not killed and time.monotonic() > deadline:
            killed = _signal(pid, marker, signal.SIGKILL)
        await asyncio.sleep(0.02)
    return not killed


def last_lines(log: Path, count: int = 12) -> str:
    """The end of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(line[:300] for line in lines[-count:])


def _signal(pid: int, marker: str, number: signal.Signals) -> bool:
    if not is_alive(pid, marker):
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _has_marker(pid: int, marker: str) -> bool:
    try:
        process = psutil.Process(pid)
        for _ in range(5):
            arguments = process.cmdline()
            if arguments or process.status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.002)  # between two programs (exec) a process has no arguments for a moment
        return marker in arguments and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
