"""Faults at an exact place, for the fault tests: off unless MEGAFLOW_FAULTS is set.

The variable holds a JSON list. Each fault names a point of the code and where it should strike:

    [{"point": "worker.before_commit", "partition": 1, "nth": 3, "action": "kill", "once": "/tmp/f1"}]

nth: strike at the n-th time (from 1) that the point is reached with all the other given values equal; default 1.
action: kill (SIGKILL to this process), stop (SIGSTOP), raise (RuntimeError), exit (status 1).
once: a file made when the fault strikes, with the process's id in it; a fault whose file exists is over, so a
    restarted process goes on.

The points there are, with the values that each is reached with:

    worker.before_init, worker.after_init      processor, partition: around the fencing of a partition's older owner
    worker.before_offsets, worker.before_commit, worker.after_commit   processor, partition: in a transaction
    compute.before_handler                     processor: in the compute process, with a batch in hand
    rank.before_plan, rank.after_plan          rank 0, around the logging of a plan; step is its first
    rank.before_exchange, rank.before_slices, rank.before_reduce, rank.after_reduce, rank.after_apply,
    rank.before_snapshot                       the step being trained
    rank.before_save, rank.after_save          in the background of rank 0: before the chunks, and between head and
                                               announcement
    checkpoint.before_chunk                    job: one of several at once
    checkpoint.before_lineage, checkpoint.before_manifest, checkpoint.before_head, checkpoint.after_head   step
    evaluator.before_commit, evaluator.after_commit   step, of the checkpoint that was evaluated

A rank's points have rank, step and generation (of the launcher's group, from 1).
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Protocol

_META = frozenset({"point", "nth", "action", "once"})


class Reach(Protocol):
    """`reach`, or it with some values given already."""

    def __call__(self, point: str, **where: object) -> None: ...


_faults: list[dict[str, Any]] = json.loads(os.environ.get("MEGAFLOW_FAULTS") or "[]")
_reached: dict[int, int] = {}


def reach(point: str, **where: object) -> None:
    """Says that `point` is reached; a fault set for it strikes here. Costs nothing when there are no faults."""
    for number, fault in enumerate(_faults):
        if fault["point"] != point or any(where.get(k) != v for k, v in fault.items() if k not in _META):
            continue
        _reached[number] = _reached.get(number, 0) + 1
        if _reached[number] == fault.get("nth", 1) and _first(fault):
            _strike(fault.get("action", "kill"), point)


def _first(fault: dict[str, Any]) -> bool:
    if "once" not in fault:
        return True
    try:
        with open(fault["once"], "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def _strike(action: str, point: str) -> None:
    if action == "raise":
        raise RuntimeError(f"the fault set at {point}")
    if action == "exit":
        os._exit(1)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])
