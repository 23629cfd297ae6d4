"""Faults at an exact place, for tests. Off unless MEGAFLOW_FAULT is set.

    MEGAFLOW_FAULT="rank=1,step=7,point=before_reduce,action=kill"

point: where a rank passes in each step: `before_exchange`, `before_plan` (rank 0, before a plan is logged),
    `after_plan`, `before_slices`, `before_reduce`, `after_reduce`, `after_apply`, `before_snapshot`; and in the
    background of rank 0 `before_save`, `after_save` (between the head and its announcement).
step: the step being trained, or of the checkpoint. rank: default any. generation: of the launcher's group, default 1,
    the first: a restarted group is not hit again. action: `kill` (SIGKILL), `stop` (SIGSTOP), `raise`.
Several faults are separated by `;`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from megaflow_stream.errors import SettingError

POINTS = frozenset(
    {
        "before_exchange",
        "before_plan",
        "after_plan",
        "before_slices",
        "before_reduce",
        "after_reduce",
        "after_apply",
        "before_snapshot",
        "before_save",
        "after_save",
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    point: str
    step: int
    rank: int | None
    generation: int
    action: str


class Faults:
    """What is to go wrong in this process."""

    def __init__(self, text: str, *, rank: int, generation: int) -> None:
        found = [parse(part) for part in text.split(";") if part.strip()]
        self.rank = rank
        self._mine = [f for f in found if f.generation == generation and f.rank in (None, rank)]

    def at(self, point: str, step: int) -> None:
        for fault in self._mine:
            if fault.point == point and fault.step == step:
                if fault.action == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.action == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    raise RuntimeError(f"a fault was asked for at {point} of step {step} on rank {self.rank}")


def parse(text: str) -> Fault:
    """One fault. Raises `SettingError` for anything but the form above."""
    try:
        fields = dict(part.strip().split("=", 1) for part in text.split(","))
        fault = Fault(
            point=fields.pop("point"),
            step=int(fields.pop("step")),
            rank=int(fields.pop("rank")) if "rank" in fields else None,
            generation=int(fields.pop("generation", "1")),
            action=fields.pop("action"),
        )
    except (KeyError, ValueError) as error:
        raise SettingError(f"MEGAFLOW_FAULT: {text!r} is not point=...,step=...,action=...") from error
    if fields or fault.point not in POINTS or fault.action not in {"kill", "stop", "raise"}:
        raise SettingError(f"MEGAFLOW_FAULT: {text!r} names an unknown field, point or action")
    return fault
