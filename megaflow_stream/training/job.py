"""What a rank is told: the job, its services, its place in the group. Travels as JSON on its stdin, never in argv."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megaflow_stream import bus, storage
from megaflow_stream.bus.api import Bus
from megaflow_stream.bus.security import Security
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.trainer import CheckpointEvery, Trainer
from megaflow_stream.errors import SettingError
from megaflow_stream.features.vocabulary import check_vocabulary
from megaflow_stream.storage.api import ObjectStore


@dataclass(frozen=True, kw_only=True)
class S3Address:
    """Where checkpoints go."""

    endpoint_url: str | None
    bucket: str = "megaflow"
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    region: str = "us-east-1"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A trainer to run.

    definition: file that declares the trainer `name`. root: the project's folder, which its tokenizer's path is from.
    replay: train what the log says from its beginning, write checkpoints as the job `NAME.replay` and nothing to Kafka.
    until_step: end after this step. checkpoint: in place of the definition's.
    gates: evaluations whose policy is sync: no step beyond a checkpoint is trained before they have evaluated it.
    """

    name: str
    definition: Path
    root: Path
    bootstrap_servers: str
    security: Security
    s3: S3Address
    replay: bool = False
    until_step: int | None = None
    checkpoint: CheckpointEvery | None = None
    gates: tuple[str, ...] = ()

    @property
    def store_name(self) -> str:
        """The name under which checkpoints are stored."""
        return f"{self.name}.replay" if self.replay else self.name

    def trainer(self) -> Trainer:
        """The definition. Raises `SettingError` for one that cannot be trained."""
        found = [t for t in definitions(self.definition, Trainer) if t.name == self.name]
        if len(found) != 1:
            raise SettingError(f"the file declares {len(found)} trainers named {self.name}", file=self.definition)
        trainer = found[0]
        if trainer.micro_slice < 1 or trainer.global_batch % trainer.micro_slice:
            raise SettingError(
                f"global_batch {trainer.global_batch} is not a multiple of micro_slice {trainer.micro_slice}",
                file=self.definition,
            )
        check_vocabulary(trainer, self.root, self.definition)
        return trainer

    async def bus(self, client: str) -> Bus:
        return await bus.connect(self.bootstrap_servers, security=self.security, client_id=f"{self.name}.{client}")

    async def store(self) -> ObjectStore:
        return await storage.connect(**asdict(self.s3))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands. run_dir: a folder that the ranks of this group share: signs of life, the store's port."""

    rank: int
    world_size: int
    generation: int
    run_dir: Path

    @property
    def sign_file(self) -> Path:
        return self.run_dir / f"generation-{self.generation}.rank-{self.rank}"

    @property
    def port_file(self) -> Path:
        return self.run_dir / f"generation-{self.generation}.port"


def to_json(job: Job, place: Place) -> bytes:
    return orjson.dumps({"job": asdict(job), "place": asdict(place)}, default=str)


def from_json(data: bytes) -> tuple[Job, Place]:
    raw: dict[str, Any] = orjson.loads(data)
    job, place = raw["job"], raw["place"]
    every = job.pop("checkpoint")
    return (
        Job(
            **{
                **job,
                "definition": Path(job["definition"]),
                "root": Path(job["root"]),
                "security": Security(**job["security"]),
                "s3": S3Address(**job["s3"]),
                "checkpoint": CheckpointEvery(**every) if every else None,
                "gates": tuple(job["gates"]),
            }
        ),
        Place(**{**place, "run_dir": Path(place["run_dir"])}),
    )
