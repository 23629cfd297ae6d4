"""When a pipeline has nothing left to do: decided from end offsets in the order of the stream, never by quiet.

raw ─▶ clean ─▶ features ─▶ plan ─▶ checkpoint ─▶ evaluation: an end offset is captured only when everything before it
has been read to its own, so what it includes is exactly what the earlier ends made.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson

from megaflow_stream.bus.api import Bus, TopicPartition
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.errors import MegaflowError
from megaflow_stream.observe.lag import Follower, measure, trainer_positions
from megaflow_stream.observe.scan import scan

log = logging.getLogger(__name__)
T = TypeVar("T")
_POLL_SECONDS = 0.3


class Settled:
    """The positions of a project's components, asked of the bus.

    processors: in the order of the stream.
    told: called with the part that is waited for, when it changes.
    """

    def __init__(
        self,
        bus: Bus,
        processors: Sequence[Processor],
        trainers: Sequence[Trainer],
        evaluations: Sequence[Evaluation],
        told: Callable[[str], None] = lambda part: None,
    ) -> None:
        self.bus, self.told = bus, told
        self.processors, self.trainers, self.evaluations = processors, trainers, evaluations

    async def now(self) -> bool:
        """Whether nothing is left to do at this moment: asked without starting anything."""
        followers = [Follower(group=p.group, topics=[p.source]) for p in self.processors]
        if any(lag.records for lag in await measure(self.bus, followers)):
            return False
        for trainer in self.trainers:
            if not await self._trained(trainer):
                return False
            last = await self.latest("checkpoints", trainer.name)
            if last is not None and self._of(trainer) and not await self._evaluated(trainer, str(last["manifest"])):
                return False
        return True

    async def wait(self) -> None:
        """Until everything that was in the topics when the call began has had its effect, also through a broker's
        restart."""
        for processor in self.processors:
            self.told(processor.name)
            ends = await _patiently(partial(self._ends, processor.source))
            await _until(partial(self._read, processor.group, ends))
        for trainer in self.trainers:
            self.told(trainer.name)
            ends = await _patiently(partial(self._ends, trainer.data))
            await _patiently(partial(self._drain, trainer.name, ends))
            await _until(partial(self._trained, trainer, ends))
            last = await _patiently(partial(self.latest, "checkpoints", trainer.name))
            for evaluation in self._of(trainer) if last is not None else ():
                self.told(evaluation.name)
                manifest = str(last["manifest"]) if last is not None else ""
                await _until(partial(self._evaluated, trainer, manifest))

    async def _ends(self, topic: str) -> dict[TopicPartition, int]:
        return await self.bus.end_offsets(await self.bus.partitions(topic))

    def _of(self, trainer: Trainer) -> list[Evaluation]:
        return [evaluation for evaluation in self.evaluations if evaluation.trainer == trainer.name]

    async def _read(self, group: str, ends: dict[TopicPartition, int]) -> bool:
        committed = await self.bus.committed(group)
        return all(committed.get(tp, 0) >= end for tp, end in ends.items())

    async def _drain(self, job: str, ends: dict[TopicPartition, int]) -> None:
        """Tells the trainer where the bounded input ends: it trains a short last batch, and checkpoints."""
        value = {"job": job, "drain": {f"{tp.topic}/{tp.partition}": end for tp, end in ends.items()}}
        producer = await self.bus.producer()
        try:
            sent = await producer.send(
                "control", orjson.dumps({**value, "id": uuid.uuid4().hex}), key=job.encode(), partition=0
            )
            await sent
        finally:
            await producer.close()

    async def _trained(self, trainer: Trainer, ends: dict[TopicPartition, int] | None = None) -> bool:
        """Whether the last checkpoint holds every record, or every record before `ends`."""
        positions = await trainer_positions(self.bus, trainer.name)
        if ends is not None and all(positions.get(tp, 0) >= end for tp, end in ends.items()):
            return True
        follower = Follower(group=trainer.name, topics=[trainer.data], positions=positions)
        return not any(lag.records for lag in await measure(self.bus, [follower]))

    async def _evaluated(self, trainer: Trainer, manifest: str) -> bool:
        async for record in scan(self.bus, "evaluations"):
            found = orjson.loads(record.value or b"{}")
            if found.get("job") == trainer.name and found.get("manifest") == manifest:
                return True
        return False

    async def latest(self, topic: str, job: str) -> dict[str, Any] | None:
        """The last record of a job on `checkpoints` or `evaluations`."""
        last: dict[str, Any] | None = None
        async for record in scan(self.bus, topic):
            found = orjson.loads(record.value or b"{}")
            if found.get("job") == job:
                last = found
        return last


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks again while the broker is away: it may be starting again."""
    while True:
        try:
            return await ask()
        except MegaflowError as error:
            if not error.retriable:
                raise
            log.info("asked again: %s", error)
            await asyncio.sleep(_POLL_SECONDS)


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    while not await _patiently(true):
        await asyncio.sleep(_POLL_SECONDS)
