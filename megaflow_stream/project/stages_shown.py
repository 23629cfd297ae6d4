"""The stages of `pipeline.yaml` as lines beside the settings: each value, and the line that it stands on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaflow_stream.config.load import FILE
from megaflow_stream.config.shown import Line
from megaflow_stream.config.units import show_bytes, show_duration
from megaflow_stream.config.yaml import Located
from megaflow_stream.definitions.pipeline import Stage
from megaflow_stream.definitions.trainer import CheckpointEvery
from megaflow_stream.project.folder import Project


def stages_shown(project: Project) -> list[Line]:
    """What each stage says, `pipeline.STAGE.KEY`; what it leaves unsaid is not shown. Raises `SettingError`."""
    stages = project.pipeline().stages
    return [
        line
        for stage, item in zip(stages, project.loaded.document["pipeline"].value, strict=True)
        for line in _of(stage, item.value)
    ]


def _of(stage: Stage, said: Mapping[str, Located]) -> list[Line]:
    asked = stage.resources
    values: dict[str, Any] = {
        "parallelism": stage.parallelism,
        "resources.cpu": asked.cpu,
        "resources.gpu": asked.gpu,
        "resources.memory": show_bytes(asked.memory_bytes),
        "ranks": stage.ranks,
        "checkpoint": stage.checkpoint and _every(stage.checkpoint),
        "depends_on": list(stage.depends_on),
        "policy": stage.policy,
    }
    lines = []
    for key, value in values.items():
        place = _place(said, key)
        if place is not None:
            text = (
                ", ".join(value)
                if isinstance(value, list)
                else f"{value:g}"
                if isinstance(value, float)
                else str(value)
            )
            lines.append(Line(f"pipeline.{stage.name}.{key}", value, text, f"{FILE}:{place.line}", _DOCS[key]))
    return lines


def _place(said: Mapping[str, Located], key: str) -> Located | None:
    first, _, second = key.partition(".")
    found = said.get(first)
    if found is None or not second:
        return found
    inner: Located | None = found.value.get(second)
    return inner


def _every(every: CheckpointEvery) -> str:
    if every.steps is not None:
        return f"every {every.steps} step{'' if every.steps == 1 else 's'}"
    return f"every {show_duration(every.seconds or 0.0)}"


_DOCS = {
    "parallelism": "worker processes",
    "resources.cpu": "CPUs of one instance",
    "resources.gpu": "GPUs of one instance",
    "resources.memory": "memory of one instance",
    "ranks": "processes that train together",
    "checkpoint": "when a checkpoint is due",
    "depends_on": "stages whose results it reads",
    "policy": "whether the trainer waits for it",
}
