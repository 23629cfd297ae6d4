"""The course of a fault: a place is reached, a process is struck, and what was frozen goes on again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil

from tests.fault.pipeline_schedule import Fault


class Strike:
    """One fault. `tend` is called again and again while processes run that know of the fault.

    processes: the live processes of a kind. hit: those that were struck.
    """

    def __init__(self, fault: Fault, processes: Callable[[str], Sequence[psutil.Process]]) -> None:
        self.fault, self.processes = fault, processes
        self.hit: Sequence[psutil.Process] = ()
        self.struck = self.over = False
        self._by: psutil.Process | None = None
        self._thaw_at = 0.0

    @property
    def reached(self) -> bool:
        """Whether a component has come to the place. The file is empty for a moment before it says which."""
        return self.fault.once.exists() and bool(self.fault.once.read_text())

    def tend(self) -> None:
        if self.over or not self.reached:
            return
        fault = self.fault
        if self._by is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it is gone already
                self._by = psutil.Process(int(fault.once.read_text()))
        if not self.hit:
            self.hit = self._own() if fault.own else self._others()
        if not self.struck:
            if not (self.hit or fault.own) or not all(gone(p) or frozen(p) for p in self.hit):
                return
            self.struck = True
            self._thaw_at = time.monotonic() + (fault.hold_seconds or 0.0)
            if not fault.own:
                self._thaw(self._by)
        if fault.action == "stop" and any(self._held(p) for p in self.hit):
            return
        for process in self.hit:
            self._thaw(process)
        self.over = True

    def again(self) -> None:
        """After a run's end: a place that was reached when there was nobody left to strike counts for nothing."""
        if self.reached and not self.struck:
            self._thaw(self._by)
            self._by = None
            self.fault.once.unlink()

    def _own(self) -> Sequence[psutil.Process]:
        return [self._by] if self._by is not None else ()

    def _others(self) -> Sequence[psutil.Process]:
        found = self.processes(self.fault.kind)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if self.fault.action == "kill" else signal.SIGSTOP)
        return found

    def _held(self, process: psutil.Process) -> bool:
        if gone(process):
            return False
        if self.fault.hold_seconds is not None:
            return time.monotonic() < self._thaw_at
        # A rank: its launcher must end it. Without one nobody does, and it ends itself when it goes on.
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            return parent is not None and "train" in parent.cmdline()
        return False

    def _thaw(self, process: psutil.Process | None) -> None:
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def frozen(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def marked(name: str, value: str, folder: str) -> dict[psutil.Process, list[str]]:
    """The live processes with `name=value` in their environment, or `folder` in their arguments; and the arguments."""
    found: dict[psutil.Process, list[str]] = {}
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):
            arguments = process.cmdline()  # a zombie has none
            if arguments and (process.environ().get(name) == value or any(folder in part for part in arguments)):
                found[process] = arguments
    return found
