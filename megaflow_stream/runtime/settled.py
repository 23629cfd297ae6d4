"""When a pipeline has nothing left to do: decided from end offsets in the order of the stream, never by quiet.

raw ─▶ clean ─▶ features ─▶ plan ─▶ checkpoint ─▶ evaluation: an end offset is captured only when everything before it
has been read to its own, so what it includes is exactly what the earlier ends made.

A job at its `max_steps` trains no more, whatever comes; when all are there, what is left in the topics has no reader.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson

from megaflow_stream.bus.api import Bus, TopicPartition, json_headers
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.errors import MegaflowError
from megaflow_stream.observe.follow import Following
from megaflow_stream.observe.lag import Follower, measure, offsets_of

log = logging.getLogger(__name__)
T = TypeVar("T")
_POLL_SECONDS = 0.3
_CONTROL = json_headers("megaflow.control/1")


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
        self._judged: set[tuple[str, str, str]] = set()  # of `evaluations`: job, evaluation, manifest

    async def now(self) -> bool:
        """Whether nothing is left to do at this moment: asked without starting anything."""
        followers = [Follower(group=p.group, topics=[p.source]) for p in self.processors]
        lags = [] if await self._all_reached() else await measure(self.bus, followers)
        if any(lag.records or lag.open_transactions for lag in lags):
            return False
        for trainer in self.trainers:
            if not await self._trained(trainer):
                return False
            last = await self.checkpoint(trainer.name)
            for evaluation in self._of(trainer) if last is not None else ():
                if not await self._evaluated(evaluation, last):
                    return False
        return True

    async def wait(self) -> None:
        """Until everything that was in the topics when the call began has had its effect, also through a broker's
        restart."""
        for processor in self.processors:
            self.told(processor.name)
            ends = await _patiently(partial(self._ends, processor.source))
            await _until(partial(self._read, processor.group, ends), self._all_reached)
        for trainer in self.trainers:
            self.told(trainer.name)
            ends = await _patiently(partial(self._ends, trainer.data))
            await _patiently(partial(self._drain, trainer.name, ends))
            await _until(partial(self._trained, trainer, ends))
            last = await _patiently(partial(self.checkpoint, trainer.name))
            for evaluation in self._of(trainer) if last is not None else ():
                self.told(evaluation.name)
                await _until(partial(self._evaluated, evaluation, last))

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
            order = orjson.dumps({**value, "id": uuid.uuid4().hex})
            await (await producer.send("control", order, key=job.encode(), partition=0, headers=_CONTROL))
        finally:
            await producer.close()

    async def _trained(self, trainer: Trainer, ends: dict[TopicPartition, int] | None = None) -> bool:
        """Whether the last checkpoint holds every record, or every record before `ends`, or is the job's last."""
        if await self.reached(trainer):
            return True
        positions = offsets_of((await self.checkpoint(trainer.name) or {}).get("offsets"))
        if ends is not None:  # a drain moves them past the markers too, with a checkpoint of its own
            return all(positions.get(tp, 0) >= end for tp, end in ends.items())
        follower = Follower(group=trainer.name, topics=[trainer.data], positions=positions)
        return not any(lag.records or lag.open_transactions for lag in await measure(self.bus, [follower]))

    async def reached(self, trainer: Trainer) -> bool:
        """Whether the job's last checkpoint is at its `max_steps`."""
        last = await self.checkpoint(trainer.name) if trainer.max_steps is not None else None
        return last is not None and trainer.max_steps is not None and int(last["step"]) >= trainer.max_steps

    async def _all_reached(self) -> bool:
        return bool(self.trainers) and all([await self.reached(trainer) for trainer in self.trainers])

    async def _evaluated(self, evaluation: Evaluation, checkpoint: dict[str, Any] | None) -> bool:
        for record in await self._evaluations.new():
            found = orjson.loads(record.value or b"{}")
            self._judged.add((str(found.get("job")), str(found.get("evaluation")), str(found.get("manifest"))))
        return checkpoint is None or (evaluation.trainer, evaluation.name, str(checkpoint["manifest"])) in self._judged

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


async def _until(*any_of: Callable[[], Awaitable[bool]]) -> None:
    while not any([await _patiently(true) for true in any_of]):
        await asyncio.sleep(_POLL_SECONDS)
