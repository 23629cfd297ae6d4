"""A small trainer with checkpoints and validation records, on a real Kafka and a real S3, under names of its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
import torch
from torch import nn

from megaflow_stream.bus.api import Bus, TopicDescription, TopicPartition
from megaflow_stream.checkpoint import CheckpointWriter, Head, Snapshot, TensorSpec
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.evaluation import Evaluator, Topics
from megaflow_stream.features.record import PackedSequence, encode
from megaflow_stream.observe.scan import scan
from megaflow_stream.storage.api import ObjectStore
from megaflow_stream.training.batch import MicroBatch
from megaflow_stream.training.gpt import GPT, GPTConfig, loss

TOKENIZER = "ab" * 32
VOCABULARY = 32


def build_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=VOCABULARY, layers=1, heads=2, width=16, hidden=16))


def model_of(sharpness: float) -> GPT:
    """The sharper, the surer it is of its last token's echo: sequences of one repeated token have a lower loss."""
    model = build_model()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(VOCABULARY)[:, :16].repeat(1, 1) * sharpness + 0.01)
        model.embedding.weight[16:] = torch.flip(model.embedding.weight[:16], [0]) * -1
    return model


def sequence(tokens: Sequence[int], conversation: str = "c") -> PackedSequence:
    mask = np.ones(len(tokens), np.bool_)
    mask[0] = False
    return PackedSequence(
        tokens=np.array(tokens, np.uint16),
        loss_mask=mask,
        lengths=np.array([len(tokens)], np.int32),
        conversations=[conversation],
        tokenizer=TOKENIZER,
    )


def tensors_of(model: nn.Module) -> list[tuple[TensorSpec, memoryview]]:
    found = []
    for name, parameter in model.named_parameters():
        data = parameter.detach().contiguous().numpy().copy()
        spec = TensorSpec(name, "float32", tuple(data.shape), "trainable")
        found.append((spec, memoryview(data).cast("B")))
    found.append((TensorSpec("optimizer/x/step", "float32", (), "optimizer"), memoryview(bytearray(4))))
    return found


class Case:
    """topics and group of one test."""

    def __init__(self, bus: Bus, store: ObjectStore) -> None:
        self.bus, self.store = bus, store
        self.name = f"evaluation.{secrets.token_hex(5)}"
        self.topics = Topics(checkpoints=f"{self.name}.checkpoints", evaluations=f"{self.name}.evaluations")
        self.trainer = Trainer(
            name=f"{self.name}.job",
            data="unused",
            validation=f"{self.name}.validation",
            tokenizer="unused",
            build_model=build_model,
            loss=self.loss,
            build_optimizer=lambda parameters: None,
            block_tokens=16,
        )
        self.evaluation = Evaluation(name=self.name, trainer=self.trainer.name, micro_slice=3)
        self.writer = CheckpointWriter(store, self.trainer.name, definition={"tokenizer": TOKENIZER})
        self.head: Head | None = None
        self.batches = 0

    def loss(self, model: Any, batch: MicroBatch) -> tuple[torch.Tensor, int]:
        self.batches += 1
        assert tuple(batch.tokens.shape) == (3, 16)
        return loss(model, batch)

    async def make_topics(self) -> None:
        partitions = {self.topics.checkpoints: 1, self.topics.evaluations: 1, self.trainer.validation: 2}
        for name, count in partitions.items():
            await self.bus.create_topic(TopicDescription(name, count, {}))

    async def close(self) -> None:
        for name in (self.topics.checkpoints, self.topics.evaluations, self.trainer.validation):
            await self.bus.delete_topic(name)

    async def validate_on(self, *values: bytes | PackedSequence) -> None:
        """Puts validation records, each in a transaction, so that the topic has markers between them."""
        producer = await self.bus.producer(f"{self.name}.features")
        for number, value in enumerate(values):
            await producer.begin()
            data = value if isinstance(value, bytes) else encode(value)
            sent = await producer.send(self.trainer.validation, data, partition=number % 2)
            await producer.commit([sent])
        await producer.close()

    async def save(self, step: int, model: nn.Module) -> Head:
        state = {"offsets": {"features.agent/0": step}}
        self.head = await self.writer.save(Snapshot(step=step, tensors=tensors_of(model), state=state), self.head)
        return self.head

    async def announce(self, head: Head, **changes: Any) -> None:
        value = {"job": self.trainer.name, "step": head.step, "manifest": head.manifest}
        value |= {"manifest_sha256": head.sha256, "offsets": {}, "at_ms": int(time.time() * 1000), **changes}
        producer = await self.bus.producer(f"{self.name}.trainer")
        await producer.begin()
        sent = await producer.send(self.topics.checkpoints, orjson.dumps(value), key=self.trainer.name.encode())
        await producer.commit([sent])
        await producer.close()

    async def checkpoint(self, step: int, model: nn.Module) -> Head:
        head = await self.save(step, model)
        await self.announce(head)
        return head

    async def results(self) -> list[dict[str, Any]]:
        return [orjson.loads(record.value or b"") async for record in scan(self.bus, self.topics.evaluations)]

    async def caught_up(self) -> bool:
        """Whether the evaluator's position is the topic's end: its lag is 0."""
        place = TopicPartition(self.topics.checkpoints, 0)
        committed = (await self.bus.committed(f"megaflow.evaluate.{self.name}")).get(place, 0)
        return committed >= (await self.bus.end_offsets([place]))[place]

    def evaluator(self) -> Evaluator:
        return Evaluator(self.bus, self.store, self.evaluation, self.trainer, topics=self.topics)

    async def run(self, until: Callable[[], Any] | None = None) -> Evaluator:
        """An evaluator that runs until it has caught up."""
        evaluator, stop = self.evaluator(), asyncio.Event()
        task = asyncio.create_task(evaluator.run(stop))
        deadline = time.monotonic() + 60
        while not task.done() and not await self.caught_up():
            assert time.monotonic() < deadline, "the evaluator did not catch up"
            await asyncio.sleep(0.02)
        stop.set()
        await asyncio.wait_for(task, 15)
        return evaluator
