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
from megaflow_stream.observe.follow import Following
from megaflow_stream.observe.lag import Follower, measure, offsets_of

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
        self._checkpoints, self._evaluations = Following(bus, "checkpoints"), Following(bus, "evaluations")
        self._latest: dict[str, dict[str, Any]] = {}  # by job, of `checkpoints`
        self._judged: dict[str, set[str]] = {}  # by job, the manifests on `evaluations`

    async def now(self) -> bool:
        """Whether nothing is left to do at this moment: asked without starting anything."""
        followers = [Follower(group=p.group, topics=[p.source]) for p in self.processors]
        if any(lag.records or lag.open_transactions for lag in await measure(self.bus, followers)):
            return False
        for trainer in self.trainers:
            if not await self._trained(trainer):
                return False
            last = await self.checkpoint(trainer.name)
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
            last = await _patiently(partial(self.checkpoint, trainer.name))
            for evaluation in self._of(trainer) if last is not None else ():
                self.told(evaluation.name)
                manifest = str(last["manifest"]) if last is not None else ""
                await _until(partial(self._evaluated, trainer, manifest))

    async def _ends(self, topic: str) -> dict[TopicPartition, int]:
        """Where a topic ends now, transactions included that are decided and not marked yet: the broker writes the
        markers after the commit has returned, and until then a read_committed end lies before the records."""
        partitions = await self.bus.partitions(topic)
        ends = await self.bus.end_offsets(partitions, isolation="read_uncommitted")
        while True:
            stable = await self.bus.end_offsets(partitions)
            if all(stable[tp] >= end for tp, end in ends.items()):
                return ends
            await asyncio.sleep(_POLL_SECONDS)

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
        positions = offsets_of((await self.checkpoint(trainer.name) or {}).get("offsets"))
        if ends is not None and all(positions.get(tp, 0) >= end for tp, end in ends.items()):
            return True
        follower = Follower(group=trainer.name, topics=[trainer.data], positions=positions)
        return not any(lag.records or lag.open_transactions for lag in await measure(self.bus, [follower]))

    async def _evaluated(self, trainer: Trainer, manifest: str) -> bool:
        for record in await self._evaluations.new():
            found = orjson.loads(record.value or b"{}")
            self._judged.setdefault(str(found.get("job")), set()).add(str(found.get("manifest")))
        return manifest in self._judged.get(trainer.name, ())

    async def checkpoint(self, job: str) -> dict[str, Any] | None:
        """The last record of a job on `checkpoints`."""
        for record in await self._checkpoints.new():
            found = orjson.loads(record.value or b"{}")
            self._latest[str(found.get("job"))] = found
        return self._latest.get(job)


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
