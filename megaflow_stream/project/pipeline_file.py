"""The `pipeline:` of `pipeline.yaml`, read into a `Pipeline`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megaflow_stream.config.yaml import Located
from megaflow_stream.definitions.pipeline import Pipeline, Resources, Stage, parse_every
from megaflow_stream.errors import SettingError
from megaflow_stream.project.table import Table


def read_pipeline(document: Mapping[str, Located], file: Path) -> Pipeline:
    """The pipeline of a document. Raises `SettingError` with file and line."""
    located = document.get("pipeline")
    if located is None or located.value in (None, []):
        line = located.line if located else None
        raise SettingError(
            "the file has no stages", hint="list them under `pipeline:`, each with its `name`", file=file, line=line
        )
    if not isinstance(located.value, list):
        raise located.error("pipeline must be a list of stages, each `- name: ...`")
    stages, lines = [], {}
    for item in located.value:
        try:
            stage = _stage(item)
        except SettingError as error:
            raise _at(error, file, item.line) from None
        stages.append(stage)
        lines[stage.name] = item.line  # of a name given twice, the second
    try:
        return Pipeline(stages=tuple(stages))
    except SettingError as error:
        raise _at(error, file, lines.get(str(error.where.get("stage")))) from None


def _stage(item: Located) -> Stage:
    table = Table(item, "a stage")
    name = table.take("name", "text")
    if not name:
        raise item.error("a stage has no name", "give it `name:`, the name of its file in processors/ or trainers/")
    table.what = f"stage {name}"
    resources = table.taken("resources")
    stage = Stage(
        name=name,
        resources=_resources(resources, f"resources of stage {name}") if resources else Resources(),
        parallelism=table.take("parallelism", "integer", 1, least=1),
        checkpoint=table.parsed("checkpoint", parse_every, None),
        depends_on=table.take("depends_on", "texts", ()),
        policy=table.choice("policy", ("async", "sync")),
        ranks=table.take("ranks", "integer", least=1),
    )
    table.end()
    return stage


def _resources(located: Located, what: str) -> Resources:
    table = Table(located, what)
    found = Resources(
        cpu=table.take("cpu", "number", 0.0, least=0),
        gpu=table.take("gpu", "integer", 0, least=0),
        memory_bytes=table.take("memory", "bytes", 0),
    )
    table.end()
    return found


def _at(error: SettingError, file: Path, line: int | None) -> SettingError:
    """The same error with its place, where it has none."""
    place = {"file": file, "line": line} | error.where
    return SettingError(error.message, hint=error.hint, **place)
