"""The pipeline as a project declares it: stages, what each asks for, in which order they come."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megaflow_stream.config.units import parse_duration
from megaflow_stream.config.values import suggestion
from megaflow_stream.definitions.trainer import CheckpointEvery
from megaflow_stream.errors import SettingError

Policy = Literal["async", "sync"]

EVERY_SPELLINGS = "`every 2h`, `every 30s` (ms, s, m, h, d) or `every 200 steps`"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEPS = re.compile(r"every +([0-9]{1,12}) +steps?")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one instance of a stage asks for; 0 asks for nothing in particular."""

    cpu: float = 0.0
    gpu: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine has."""

    cpu: int
    gpu: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: its name is its definition's file, `processors/NAME.py` or `trainers/NAME.py`.

    parallelism: worker processes of a processor, at most the partitions of its topic.
    checkpoint: in place of the trainer's own.
    depends_on: stages whose results this one reads.
    policy: of an evaluation: `async` never holds back its trainer, `sync` gates the trainer's next interval.
    ranks: processes of a trainer on this machine.
    """

    name: str
    resources: Resources = field(default_factory=Resources)
    parallelism: int = 1
    checkpoint: CheckpointEvery | None = None
    depends_on: tuple[str, ...] = ()
    policy: Policy | None = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SettingError(
                f"{self.name!r} cannot be the name of a stage",
                hint="it names a Python file under processors/ or trainers/: letters, digits and _",
                stage=self.name,
            )
        if self.parallelism < 1:
            raise SettingError(f"parallelism must be at least 1, not {self.parallelism}", stage=self.name)
        if self.ranks is not None and self.ranks < 1:
            raise SettingError(f"ranks must be at least 1, not {self.ranks}", stage=self.name)
        if min(self.resources.cpu, self.resources.gpu, self.resources.memory_bytes) < 0:
            raise SettingError("resources cannot be below 0", stage=self.name)
        if self.policy not in (None, "async", "sync"):
            raise SettingError(f"policy must be async or sync, not {self.policy!r}", stage=self.name)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of a project. Raises `SettingError` that names the stage which does not fit in."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        for index, stage in enumerate(self.stages):
            if stage.name in names[:index]:
                raise SettingError(f"there are two stages {stage.name!r}", stage=stage.name)
            for other in stage.depends_on:
                if other not in names:
                    raise SettingError(
                        f"depends_on names {other!r}, which is no stage",
                        hint=suggestion(other, names),
                        stage=stage.name,
                    )
        self.ordered()

    def stage(self, name: str) -> Stage:
        """The stage of that name. Raises `SettingError` where there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise SettingError(f"there is no stage {name!r}", hint=suggestion(name, [s.name for s in self.stages]))

    def ordered(self) -> list[Stage]:
        """The stages, each after those it depends on, otherwise as they are written."""
        done: dict[str, Stage] = {}
        left = list(self.stages)
        while left:
            ready = [stage for stage in left if all(name in done for name in stage.depends_on)]
            if not ready:
                names = ", ".join(stage.name for stage in left)
                raise SettingError(f"depends_on runs in a circle through {names}", stage=left[0].name)
            done[ready[0].name] = ready[0]
            left.remove(ready[0])
        return list(done.values())


def parse_every(text: object) -> CheckpointEvery:
    """`every 2h`, `every 30s`, `every 200 steps`. Raises `ValueError` that names the accepted spellings."""
    wrong = ValueError(f"{text!r} does not say when a checkpoint is due: write {EVERY_SPELLINGS}")
    if not isinstance(text, str) or not text.startswith("every "):
        raise wrong
    steps = _STEPS.fullmatch(text)
    try:
        every = (
            CheckpointEvery(steps=int(steps[1])) if steps else CheckpointEvery(seconds=parse_duration(text[6:].strip()))
        )
    except ValueError:
        raise wrong from None
    if not (every.steps or every.seconds):
        raise wrong
    return every


def warnings(pipeline: Pipeline, machine: Machine) -> list[str]:
    """What the stages ask for beyond what the machine has: shown, not refused, since nothing is enforced."""
    found = []
    for stage in pipeline.stages:
        asked: Mapping[str, tuple[float, float, float]] = {
            "CPUs": (stage.resources.cpu, machine.cpu, 1),
            "GPUs": (stage.resources.gpu, machine.gpu, 1),
            "GiB of memory": (stage.resources.memory_bytes, machine.memory_bytes, 1 << 30),
        }
        for what, (each, there, unit) in asked.items():
            total = each * stage.parallelism
            if total > there:
                times = f"{stage.parallelism} x {each / unit:g} = " if stage.parallelism > 1 else ""
                found.append(
                    f"stage {stage.name} asks for {times}{total / unit:g} {what}, this machine has {there / unit:.4g}"
                )
    return found
