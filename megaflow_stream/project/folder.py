"""A project's folder: where it is, what it declares.

A stage's name is its file: `processors/NAME.py`, or `trainers/NAME.py`; its kind follows from what the file declares.
Definition files are loaded only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from megaflow_stream.config.load import FILE, Loaded, load
from megaflow_stream.config.settings import Settings
from megaflow_stream.config.values import suggestion
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.pipeline import Pipeline, Stage
from megaflow_stream.definitions.topic import Topic
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.errors import SettingError
from megaflow_stream.project.pipeline_file import read_pipeline
from megaflow_stream.project.topic_file import expand, read_topic

if TYPE_CHECKING:  # it imports pyarrow, which no command should wait for that needs no processor
    from megaflow_stream.definitions.processor import Processor

Kind = Literal["processor", "trainer", "evaluation"]
D = TypeVar("D", "Processor", Trainer, Evaluation)


@dataclass(frozen=True)
class Project:
    """A project with its settings as they are now."""

    root: Path
    loaded: Loaded

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @property
    def state_dir(self) -> Path:
        """Where the embedded services and runs of this project keep their files; not under version control."""
        return self.root / ".megaflow"

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets of the project, the default one first."""
        return tuple(dict.fromkeys((self.settings.publish.dataset, *self.settings.datasets)))

    def topics(self) -> list[Topic]:
        """The topics that the project declares, by name. Raises `SettingError` for a wrong file."""
        found: dict[str, tuple[Topic, Path]] = {}
        folder = self.root / "topics"
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
            for topic in expand(read_topic(path), self.datasets):
                if topic.name in found:
                    other = found[topic.name][1].name
                    raise SettingError(f"the topic {topic.name} is declared in {other} too", file=path)
                found[topic.name] = topic, path
        return [topic for _, (topic, _) in sorted(found.items())]

    @cached_property
    def _pipeline(self) -> Pipeline:
        return read_pipeline(self.loaded.document, self.root / FILE)

    def pipeline(self) -> Pipeline:
        """The stages of `pipeline.yaml`. Raises `SettingError` with its line."""
        return self._pipeline

    def kind(self, stage: Stage | str) -> Kind:
        """What a stage is, by what its file declares."""
        name = stage if isinstance(stage, str) else stage.name
        if (self.root / "processors" / f"{name}.py").is_file():
            return "processor"
        path = self.root / "trainers" / f"{name}.py"
        if not path.is_file():
            files = [p.stem for folder in ("processors", "trainers") for p in (self.root / folder).glob("*.py")]
            raise SettingError(
                f"the stage {name!r} has no definition processors/{name}.py or trainers/{name}.py",
                hint=suggestion(name, files) if files else "write one, or take the stage out of pipeline.yaml",
            )
        trainers, evaluations = definitions(path, Trainer), definitions(path, Evaluation)
        if len(trainers) + len(evaluations) != 1:
            raise SettingError(
                f"the file must declare exactly one Trainer or Evaluation, it declares {len(trainers)} and "
                f"{len(evaluations)}",
                file=path,
            )
        return "trainer" if trainers else "evaluation"

    def processors(self, stage: Stage | str) -> list[tuple[Path, Processor]]:
        """The processors that a stage's file declares, with the file."""
        from megaflow_stream.definitions.processor import Processor

        name = stage if isinstance(stage, str) else stage.name
        path = self.root / "processors" / f"{name}.py"
        found = definitions(path, Processor)
        if not found:
            raise SettingError("the file declares no Processor", file=path)
        return [(path, processor) for processor in found]

    def processor(self, name: str) -> tuple[Path, Processor]:
        """The processor of that name in any file of `processors/`."""
        from megaflow_stream.definitions.processor import Processor

        return self._one("processors", name, Processor)

    def trainer(self, name: str) -> tuple[Path, Trainer]:
        """The trainer of that name."""
        return self._one("trainers", name, Trainer)

    def evaluation(self, name: str) -> tuple[Path, Evaluation]:
        """The evaluation of that name."""
        return self._one("trainers", name, Evaluation)

    def gates(self, trainer: str) -> tuple[str, ...]:
        """The evaluations of a trainer whose stage says `policy: sync`."""
        sync = [self.evaluation(stage.name)[1] for stage in self.pipeline().stages if stage.policy == "sync"]
        return tuple(evaluation.name for evaluation in sync if evaluation.trainer == trainer)

    def _one(self, folder: str, name: str, kind: type[D]) -> tuple[Path, D]:
        found: dict[str, tuple[Path, D]] = {}
        for path in sorted((self.root / folder).glob("*.py")):
            for definition in definitions(path, kind):
                if definition.name in found:
                    other = found[definition.name][0].name
                    raise SettingError(f"{kind.__name__} {definition.name!r} is declared in {other} too", file=path)
                found[definition.name] = path, definition
        if name not in found:
            hint = suggestion(name, found) if found else f"{self.root / folder} declares none"
            raise SettingError(f"there is no {kind.__name__} {name!r} in {folder}/", hint=hint)
        return found[name]


def find(start: Path | None = None, flags: Mapping[str, str | None] | None = None) -> Project:
    """The project that `start`, or the current folder, is in: it or the nearest folder above that has `pipeline.yaml`.

    Raises `SettingError` where there is none, and for wrong settings.
    """
    here = (start or Path.cwd()).resolve()
    if start is not None and not here.is_dir():
        raise SettingError(f"there is no folder {here}")
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return Project(folder, load(folder, flags))
    raise SettingError(
        f"{here} is not in a MegaFlow project: neither it nor a folder above has a {FILE}",
        hint="make a project with `megaflow init DIR`, or name one with --project DIR",
    )
