"""How a child process notices that its parent is gone, kill -9 included.

The parent holds the write end of a pipe and never writes; the child inherits the read end, its number in
MEGAFLOW_LIFELINE. When the last write end is closed, by the kernel if need be, the read end shows the end of file.
Write ends are close-on-exec, so no other child keeps one open by accident; a child made by fork without exec would,
and must not be made by whoever holds a lifeline.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

VARIABLE = "MEGAFLOW_LIFELINE"
HARD_EXIT_SECONDS = 10.0
HARD_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: it did not stop in time


class Lifeline:
    """The parent's end. Closing it, or dying, tells every child that was started with it to stop."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def spawn_options(self, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Keyword arguments for `subprocess.Popen` and `asyncio.create_subprocess_exec`: `env` and `pass_fds`."""
        inherited = os.environ if environment is None else environment
        return {"env": {**inherited, VARIABLE: str(self._read)}, "pass_fds": (self._read,)}

    def close(self) -> None:
        for handle in (self._write, self._read):
            with suppress(OSError):
                os.close(handle)

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def watch(
    callback: Callable[[], object],
    *,
    loop: asyncio.AbstractEventLoop | None = None,
    hard_exit_seconds: float = HARD_EXIT_SECONDS,
) -> bool:
    """Calls `callback` once when the parent is gone; False where this process was given no lifeline.

    The call comes from a thread of its own, or in `loop` where one is given. `hard_exit_seconds` later the process
    exits, done or not (exit code 70): an orphan that hangs holds partitions, memory and a place in a group.
    """
    text = os.environ.pop(VARIABLE, "")  # not for this process's own children: the number means nothing to them
    if not text.isdigit():
        return False
    handle = int(text)
    try:
        os.set_inheritable(handle, False)
    except OSError:
        return False
    waiting = (handle, callback, loop, hard_exit_seconds)
    threading.Thread(target=_wait, args=waiting, name="lifeline", daemon=True).start()
    return True


def _wait(
    handle: int, callback: Callable[[], object], loop: asyncio.AbstractEventLoop | None, hard_exit_seconds: float
) -> None:
    with suppress(OSError):
        os.read(handle, 1)
    # The bound comes first: it holds whatever the callback does.
    last = threading.Timer(hard_exit_seconds, _exit_hard, args=(hard_exit_seconds,))
    last.daemon = True
    last.start()
    if loop is None:
        callback()
        return
    with suppress(RuntimeError):  # the loop is closed: the process is ending as it is
        loop.call_soon_threadsafe(callback)


def _exit_hard(seconds: float) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"the parent process is gone, and this one did not stop within {seconds:.0f} s: exit\n")
        sys.stderr.flush()
    os._exit(HARD_EXIT_CODE)
