"""A rank's sign of life: a small file that its launcher reads, written without ever waiting.

32 bytes in a memory-mapped file: CLOCK_MONOTONIC of the last sign (which is one clock for all processes of a
machine), the step, the phase. A rank that waits for others in a collective signs once a second, so that of a group only
the one that is stopped or stuck falls silent.
"""

from __future__ import annotations

import mmap
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

_FORM = struct.Struct("<dqqq")


class Phase(IntEnum):
    """What a rank is at. `STARTING` covers imports, building the model and restoring: it has its own, longer bound."""

    STARTING = 0
    EXCHANGE = 1
    SLICES = 2
    REDUCE = 3
    APPLY = 4
    CHECKPOINT = 5
    IDLE = 6
    STOPPING = 7


class Sign(NamedTuple):
    """A sign of life as read. at: seconds of the monotonic clock."""

    at: float
    step: int
    phase: Phase


class Progress:
    """The writer's side."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"\0" * _FORM.size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORM.size)
        self._step, self._phase = 0, Phase.STARTING
        self.sign(Phase.STARTING, 0)

    def sign(self, phase: Phase, step: int) -> None:
        self._step, self._phase = step, phase
        self.again()

    def again(self) -> None:
        """The same step and phase, still alive."""
        _FORM.pack_into(self._map, 0, time.monotonic(), self._step, int(self._phase), 0)


def read_sign(path: Path) -> Sign | None:
    """The last sign; None before the first."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _FORM.size:
        return None
    at, step, phase, _ = _FORM.unpack(data)
    return Sign(at, step, Phase(phase)) if at else None
