"""Which faults a whole pipeline meets: what strikes whom, and where. A function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as numbers
from itertools import product
from pathlib import Path

KINDS = ("worker", "compute", "rank", "store", "evaluator", "launcher", "statistics", "kafka", "s3", "run")
ACTIONS = ("kill", "stop")
PAIRS = len(KINDS) * len(ACTIONS)

# How long a frozen process stays so. A worker sleeps through its session of 10 s, and another takes over what it had;
# a rank until its launcher has ended it; nobody takes over from the others, they only keep everybody waiting.
HOLD_SECONDS = {"worker": 13.0, "rank": None, "store": None}
SHORT_HOLD_SECONDS = 3.0

Where = dict[str, object]
_PROCESSORS = ("clean", "features")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`action` (kill: SIGKILL, stop: SIGSTOP) strikes a process of `kind` when a component reaches the place `where`.

    kind: of `KINDS`; store is rank 0 while it stores a checkpoint, launcher is `megaflow train`.
    where: as `megaflow_stream.faults` takes it. once: the file that says that the place was reached, and by whom.
    """

    kind: str
    action: str
    where: Where
    once: Path

    @property
    def own(self) -> bool:
        """Whether the component that reaches the place is the one that is struck. If not, it is frozen there until
        the harness has struck the other."""
        return self.kind in ("worker", "compute", "rank", "store", "evaluator")

    @property
    def hold_seconds(self) -> float | None:
        """How long the process stays frozen; None until somebody ends it."""
        return HOLD_SECONDS.get(self.kind, SHORT_HOLD_SECONDS)

    @property
    def settings(self) -> dict[str, object]:
        """One entry of MEGAFLOW_FAULTS."""
        return {**self.where, "action": self.action if self.own else "stop", "once": str(self.once)}

    def __str__(self) -> str:
        place = " ".join(f"{name}={value}" for name, value in self.where.items() if name != "point")
        return f"{self.action} {self.kind} at {self.where['point']} {place}"


def schedule(seed: int, count: int, folder: Path) -> list[Fault]:
    """`count` faults: every kind killed and frozen in turn, in an order and at places that the seed chooses."""
    rng = random.Random(seed)
    pairs = list(product(KINDS, ACTIONS))
    rng.shuffle(pairs)
    places = _Places(rng)
    return [
        Fault(kind=kind, action=action, where=places.of(kind), once=folder / f"fault-{number:02d}")
        for number, (kind, action) in enumerate((pairs * (1 + count // PAIRS))[:count])
    ]


class _Places:
    """Chooses places. Those of steps come one behind another, so that no start of the ranks is without a step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.steps = rng, numbers(2, 3)

    def of(self, kind: str) -> Where:
        at_a_step, at_the_plan = self.step, self.plan
        choices: dict[str, tuple[Callable[[], Where], ...]] = {
            "worker": (self.worker,),
            "compute": (self.compute,),
            "rank": (at_a_step, at_a_step, at_the_plan),
            "store": (self.store,),
            "evaluator": (self.evaluator,),
            "launcher": (at_a_step, self.store),
            "statistics": (self.commit,),
            "kafka": (self.commit, at_the_plan, self.evaluator, self.announcement),
            "s3": (self.store,),
            "run": (self.commit, at_a_step, self.store, self.evaluator),
        }
        return self.rng.choice(choices[kind])()

    def worker(self) -> Where:
        return self.rng.choice((self.start, self.commit))()

    def start(self) -> Where:
        return self._some("worker.before_init", "worker.after_init", processor=self.rng.choice(_PROCESSORS))

    def commit(self) -> Where:
        points = ("worker.before_offsets", "worker.before_commit", "worker.after_commit")
        return self._some(*points, processor=self.rng.choice(_PROCESSORS), nth=self.rng.randint(1, 3))

    def compute(self) -> Where:
        return self._some("compute.before_handler", processor=self.rng.choice(_PROCESSORS), nth=self.rng.randint(1, 2))

    def step(self) -> Where:
        points = ("rank.before_slices", "rank.before_reduce", "rank.after_reduce", "rank.after_apply")
        return self._some(*points, rank=self.rng.randint(0, 1), step=next(self.steps))

    def plan(self) -> Where:
        return self._some("rank.before_plan", "rank.after_plan", nth=self.rng.randint(1, 2))

    def store(self) -> Where:
        return self._some(
            "rank.before_snapshot",
            "checkpoint.before_chunk",
            "checkpoint.before_lineage",
            "checkpoint.before_manifest",
            "checkpoint.before_head",
            "checkpoint.after_head",
            "rank.after_save",
            nth=1,
        )

    def announcement(self) -> Where:
        return self._some("rank.after_save", nth=1)

    def evaluator(self) -> Where:
        return self._some("evaluator.before_commit", "evaluator.after_commit", nth=1)

    def _some(self, *points: str, **where: object) -> Where:
        return {"point": self.rng.choice(points), **where}
