"""A small training job on the tests' real services: its own project and topics, its ranks as threads or processes."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megaflow_stream import bus as buses
from megaflow_stream.bus import Bus, TopicDescription, TopicPartition
from megaflow_stream.bus.security import Security
from megaflow_stream.checkpoint import lineage, load
from megaflow_stream.features import record as features
from megaflow_stream.storage import ObjectStore
from megaflow_stream.training.job import Job, Place, S3Address
from megaflow_stream.training.rank import Stop, train

VOCABULARY, BLOCK = 64, 32

DEFINITION = """
from megaflow_stream.definitions.trainer import CheckpointEvery, Trainer


def build_model():
    from megaflow_stream.training.gpt import GPT, GPTConfig

    return GPT(GPTConfig(vocabulary={vocabulary}, layers=2, heads=2, width=16, hidden=32))


def build_optimizer(parameters):
    from megaflow_stream.training.optimizers import BuildAdamW

    return BuildAdamW(learning_rate=1e-2)(parameters)


def build_schedule(optimizer):
    from megaflow_stream.training.optimizers import WarmupConstant

    return WarmupConstant(warmup_steps=3)(optimizer)


def loss(model, batch):
    from megaflow_stream.training import gpt

    return gpt.loss(model, batch)


trainer = Trainer(
    name="{name}",
    data="{data}",
    validation="{data}.validation",
    tokenizer="tokenizer.json",
    build_model=build_model,
    build_optimizer=build_optimizer,
    build_schedule=build_schedule,
    loss=loss,
    block_tokens={block},
    micro_slice=2,
    global_batch=8,
    linger_seconds={linger},
    rank_timeout_seconds={rank_timeout},
    checkpoint=CheckpointEvery(steps=5),
)
"""


@dataclass
class TrainingJob:
    """One job. `kafka`, `s3` are the fixtures."""

    kafka: str
    s3: Any
    root: Path
    partitions: int = 4
    linger_seconds: float = 0.3
    rank_timeout_seconds: float = 30.0
    name: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    written: int = 0

    def __post_init__(self) -> None:
        self.data = f"features.{self.name}"
        (self.root / "tokenizer.json").write_text('{"a": "tokenizer"}')
        self.tokenizer = hashlib.sha256((self.root / "tokenizer.json").read_bytes()).hexdigest()
        self.definition = self.root / f"{self.name}.py"
        self.definition.write_text(
            DEFINITION.format(
                vocabulary=VOCABULARY,
                name=self.name,
                data=self.data,
                block=BLOCK,
                linger=self.linger_seconds,
                rank_timeout=self.rank_timeout_seconds,
            )
        )
        self.job = Job(
            name=self.name,
            definition=self.definition,
            root=self.root,
            bootstrap_servers=self.kafka,
            security=Security(),
            s3=S3Address(
                endpoint_url=self.s3.endpoint_url,
                bucket="megaflow-test-training",
                access_key=self.s3.access_key,
                secret_key=self.s3.secret_key,
                region=self.s3.region,
            ),
        )

    async def bus(self) -> Bus:
        return await buses.connect(self.kafka)

    async def store(self) -> ObjectStore:
        return await self.job.store()

    async def topics(self) -> None:
        bus = await self.bus()
        await bus.create_topic(TopicDescription(self.data, self.partitions))
        await bus.create_topic(TopicDescription(f"plan.{self.name}", 1))
        await bus.create_topic(TopicDescription("control", 1, {"cleanup.policy": "compact"}))
        await bus.create_topic(TopicDescription("status", 1, {"cleanup.policy": "compact"}))
        await bus.create_topic(TopicDescription("status.events", 1))
        await bus.create_topic(TopicDescription("checkpoints", 1))
        await bus.create_topic(TopicDescription("evaluations", 1))
        await bus.close()

    async def write(self, records: int, partitions: Sequence[int] | None = None, tokenizer: str = "") -> None:
        """Feature records of two conversations each, in transactions of up to 10, so that offsets have gaps."""
        bus = await self.bus()
        producer = await bus.producer(f"test.{self.name}")
        targets = list(partitions if partitions is not None else range(self.partitions))
        rng = np.random.default_rng(self.written)
        for start in range(0, records, 10):
            await producer.begin()
            sent: list[asyncio.Future[Any]] = []
            for i in range(start, min(records, start + 10)):
                number = self.written + i
                sequence = sample(rng, number, tokenizer or self.tokenizer)
                headers = [(k, v.encode()) for k, v in features.headers(sequence).items()]
                target = targets[number % len(targets)]
                sent.append(
                    await producer.send(self.data, features.encode(sequence), partition=target, headers=headers)
                )
            await producer.commit(sent)
        self.written += records
        await producer.close()
        await bus.close()

    async def ends(self) -> dict[TopicPartition, int]:
        bus = await self.bus()
        ends = await bus.end_offsets(await bus.partitions(self.data))
        await bus.close()
        return ends

    async def drain(self) -> str:
        """Tells the trainer that its input ends where it ends now."""
        import orjson

        ends = await self.ends()
        bus = await self.bus()
        producer = await bus.producer()
        drain = {f"{p.topic}/{p.partition}": end for p, end in ends.items()}
        name = uuid.uuid4().hex
        sent = await producer.send(
            "control",
            orjson.dumps({"job": self.name, "drain": drain, "id": name}),
            key=self.name.encode(),
            partition=0,
        )
        await sent
        await producer.close()
        await bus.close()
        return name

    def with_(self, **changes: Any) -> Job:
        return replace(self.job, **changes)


def sample(rng: np.random.Generator, number: int, tokenizer: str) -> features.PackedSequence:
    """Two documents that count up from a random token: easy to learn."""
    lengths = [int(n) for n in rng.integers(6, BLOCK // 2 + 1, 2)]
    tokens = np.concatenate([(int(rng.integers(VOCABULARY)) + np.arange(n)) % VOCABULARY for n in lengths])
    mask = rng.random(len(tokens)) < 0.6
    mask[[0, lengths[0]]] = False
    return features.PackedSequence(
        tokens=tokens.astype(np.uint16),
        loss_mask=mask,
        lengths=np.array(lengths, np.int32),
        conversations=[f"conversation-{2 * number}", f"conversation-{2 * number + 1}"],
        tokenizer=tokenizer,
    )


class ThreadGroup:
    """The ranks of one generation as threads of this process: the real code, without the seconds of an import."""

    def __init__(self, job: Job, ranks: int, generation: int = 1) -> None:
        self.events: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []
        self.stop = Stop()
        self._changed = threading.Condition()
        self._folder = tempfile.TemporaryDirectory(prefix="megaflow-test-")
        places = [
            Place(rank=n, world_size=ranks, generation=generation, run_dir=Path(self._folder.name))
            for n in range(ranks)
        ]
        self._threads = [threading.Thread(target=self._run, args=(job, place), daemon=True) for place in places]
        for thread in self._threads:
            thread.start()

    def _run(self, job: Job, place: Place) -> None:
        closing = ExitStack()
        try:
            train(job, place, self.stop, self._emit, closing)
        except BaseException as error:
            with self._changed:
                self.errors.append(error)
                self._changed.notify_all()
        finally:
            closing.close()

    def _emit(self, event: str, numbers: Mapping[str, Any]) -> None:
        with self._changed:
            self.events.append({"event": event, **numbers})
            self._changed.notify_all()

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in list(self.events) if e["event"] == event]

    def wait(self, event: str, count: int = 1, **numbers: Any) -> dict[str, Any]:
        """The event, once there are so many with these numbers. Raises what ended a rank before."""

        def found() -> list[dict[str, Any]]:
            return [e for e in self.events if e["event"] == event and numbers.items() <= e.items()]

        with self._changed:
            assert self._changed.wait_for(lambda: self.errors or len(found()) >= count, 60), self.events[-3:]
            if not self.errors:
                return found()[count - 1]
        self.join()
        raise AssertionError("a rank failed without an error")

    def join(self) -> list[dict[str, Any]]:
        """Waits for the end of all ranks; raises what ended one."""
        for thread in self._threads:
            thread.join(60)
            if thread.is_alive():  # one that waits for a rank that has failed
                assert self.errors, "a rank does not end"
                raise self.errors[0]
        self._folder.cleanup()
        if self.errors:
            raise self.errors[0]
        return self.events


def final(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last word of rank 0: step, weights_sha256, ..."""
    return next(e for e in reversed(events) if e["event"] == "stopped")


async def trained(job: TrainingJob, store_name: str = "") -> list[tuple[int, int, str, int]]:
    """(partition, offset, conversation, step) of everything that made the head, from its lineage."""
    store = await job.store()
    try:
        loaded = await load(store, store_name or job.name)
        table = await lineage.of_checkpoint(store, loaded.manifest)
    finally:
        await store.close()
    return sorted((r["partition"], r["offset"], r["conversation"], r["step"]) for r in table.to_pylist())
