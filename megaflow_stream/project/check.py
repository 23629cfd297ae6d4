"""Whether a project fits together, looked at before anything is started.

What cannot work is a `SettingError`: a stage without a definition, a topic that nobody declares, a plan that expires
before its features. What works otherwise than it was written is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megaflow_stream.config.load import FILE
from megaflow_stream.config.values import suggestion
from megaflow_stream.definitions.pipeline import Machine, Stage, warnings
from megaflow_stream.definitions.topic import Topic
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.errors import SettingError
from megaflow_stream.project.folder import Kind, Project
from megaflow_stream.project.machine import this_machine

if TYPE_CHECKING:
    from megaflow_stream.definitions.processor import Processor

# What a stage may say, beside name, resources and depends_on, by its kind.
_SAYS: Mapping[Kind, tuple[str, ...]] = {
    "processor": ("parallelism",),
    "trainer": ("checkpoint", "ranks"),
    "evaluation": ("policy",),
}
FETCH_BYTES = 1 << 20  # what a reader asks of a partition at once
TOKEN_BYTES = 3  # of a packed sequence: two of the id, an eighth of the mask, the record's own
_UNSAID = {"parallelism": 1, "checkpoint": None, "ranks": None, "policy": None}


def check(project: Project, machine: Machine | None = None) -> list[str]:
    """The warnings. Loads every definition of the pipeline's stages. Raises `SettingError` for what cannot work."""
    topics = {topic.name: topic for topic in project.topics()}
    found = warnings(project.pipeline(), machine or this_machine())
    for stage in project.pipeline().ordered():
        kind = project.kind(stage)
        _check_said(project, stage, kind)
        if kind == "processor":
            for path, processor in project.processors(stage):
                _check_processor(project, path, processor, topics)
                _check_backlog(project, path, processor)
            found += _capped(project, stage, topics)
        elif kind == "trainer":
            _check_trainer(project, *project.trainer(stage.name), topics)
        else:
            path, evaluation = project.evaluation(stage.name)
            try:
                project.trainer(evaluation.trainer)
            except SettingError as error:
                raise SettingError(
                    f"Evaluation {evaluation.name}: {error.message}", hint=error.hint, file=path
                ) from None
    return found


def workers(project: Project, stage: Stage) -> int:
    """Worker processes of a processor's stage: its parallelism, at most the partitions that its processors read."""
    topics = {topic.name: topic for topic in project.topics()}
    return min(stage.parallelism, _partitions(project, stage, topics))


def _partitions(project: Project, stage: Stage, topics: Mapping[str, Topic]) -> int:
    return max(_topic(topics, p.source, path).partitions for path, p in project.processors(stage))


def _capped(project: Project, stage: Stage, topics: Mapping[str, Topic]) -> list[str]:
    partitions = _partitions(project, stage, topics)
    if stage.parallelism <= partitions:
        return []
    return [
        f"stage {stage.name} asks for {stage.parallelism} workers, its topics have {partitions} partitions: "
        f"{partitions} workers are started"
    ]


def _check_said(project: Project, stage: Stage, kind: Kind) -> None:
    for name, unsaid in _UNSAID.items():
        if getattr(stage, name) != unsaid and name not in _SAYS[kind]:
            raise SettingError(
                f"stage {stage.name}: {name} means nothing for this kind of stage ({kind})",
                hint=f"take it out; it may say {', '.join(_SAYS[kind])}",
                file=project.root / FILE,
                line=_line(project, stage.name, name),
            )


def _line(project: Project, stage: str, key: str) -> int | None:
    for item in project.loaded.document["pipeline"].value:
        if item.value["name"].value == stage:
            return int(item.value.get(key, item).line)
    return None


def _topic(topics: Mapping[str, Topic], name: str, file: Path) -> Topic:
    if name not in topics:
        raise SettingError(f"topics/ does not declare {name!r}", hint=suggestion(name, topics), file=file)
    return topics[name]


def _check_processor(project: Project, file: Path, processor: Processor, topics: Mapping[str, Topic]) -> None:
    source = _topic(topics, processor.source, file)
    others = (processor.backlog.topic,) if processor.backlog else ()
    for name in (processor.dead_letters, processor.dropped, processor.statistics, *others):
        _topic(topics, name, file)
    for sink in processor.sinks:
        for dataset in project.datasets:
            topic = _topic(topics, sink.topic.replace("{dataset}", dataset), file)
            if sink.partition == "input" and topic.partitions < source.partitions:
                raise SettingError(
                    f"Processor {processor.name} writes {topic.name} by input partition, but it has "
                    f"{topic.partitions} partitions and {source.name} has {source.partitions}",
                    hint=f"declare at least {source.partitions} partitions in topics/",
                    file=file,
                )
    if processor.state is not None:
        changelog = _topic(topics, processor.state.changelog, file)
        if changelog.partitions != source.partitions:
            raise SettingError(
                f"Processor {processor.name} keeps its state in {changelog.name}, which has {changelog.partitions} "
                f"partitions, but {source.name} has {source.partitions}",
                hint="declare as many in topics/",
                file=file,
            )


def _check_backlog(project: Project, file: Path, processor: Processor) -> None:
    """A budget that one fetch or one global batch exceeds would hold the stream still for ever."""
    backlog = processor.backlog
    if backlog is None:
        return
    least, what = FETCH_BYTES, "one fetch"
    for stage in project.pipeline().stages:
        if project.kind(stage) == "trainer":
            trainer = project.trainer(stage.name)[1]
            batch = trainer.global_batch * trainer.block_tokens * TOKEN_BYTES
            if trainer.data == backlog.topic and batch > least:
                least, what = batch, f"one global batch of {trainer.name}"
    if not least <= backlog.low_bytes < backlog.high_bytes:
        raise SettingError(
            f"Processor {processor.name}: a backlog of {backlog.low_bytes:,} to {backlog.high_bytes:,} bytes on "
            f"{backlog.topic} cannot work",
            hint=f"low_bytes must be at least {least:,} ({what}), and below high_bytes",
            file=file,
        )


def _check_trainer(project: Project, file: Path, trainer: Trainer, topics: Mapping[str, Topic]) -> None:
    data, plan = _topic(topics, trainer.data, file), _topic(topics, trainer.plan_topic, file)
    _topic(topics, trainer.validation, file)
    if plan.partitions != 1 or plan.cleanup != "delete":
        raise SettingError(
            f"the plan topic {plan.name} must have 1 partition and `cleanup: delete`, it is declared with "
            f"{plan.partitions} and {plan.cleanup}",
            hint="a plan is one order, and each of its entries is needed",
        )
    kept, needed = plan.retention_seconds, data.retention_seconds
    if kept >= 0 and (needed < 0 or kept <= needed):
        raise SettingError(
            f"the plan topic {plan.name} must be kept longer than its features {data.name}",
            hint="declare `retention: forever` in its file in topics/",
        )
    if not (project.root / trainer.tokenizer).is_file():
        raise SettingError(
            f"Trainer {trainer.name}: there is no tokenizer {project.root / trainer.tokenizer}",
            hint="make one with `megaflow tokenizer train`",
            file=file,
        )
    from megaflow_stream.features.vocabulary import check_vocabulary  # numpy and tokenizers, late

    check_vocabulary(trainer, project.root, file)
