"""Where a conversation went: trained, waiting, validation, dropped, a dead letter, published, or not seen.

Lineage is asked first: it outlives the topics. Then the topics that are small, then the long ones; the search ends
where it cannot find more. A conversation may be in several places: trained, and dropped again as a duplicate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from megaflow_stream import checkpoint
from megaflow_stream.bus.api import Bus, Record, TopicPartition
from megaflow_stream.checkpoint import lineage
from megaflow_stream.errors import BadRecord, NotFound
from megaflow_stream.features.record import decode
from megaflow_stream.observe.scan import scan
from megaflow_stream.processing.steps.features import Features, is_validation
from megaflow_stream.storage.api import ObjectStore

if TYPE_CHECKING:
    from megaflow_stream.definitions.processor import Processor
    from megaflow_stream.definitions.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Found:
    """One place. what: trained, waiting (packed, not in a checkpoint yet), validation, dropped, dead_letter, published
    (in the first topic, nothing known of what became of it). details: by `what`, JSON values."""

    what: str
    topic: str
    partition: int
    offset: int
    details: dict[str, Any] = field(default_factory=dict)


async def find(
    bus: Bus, store: ObjectStore, conversation: str, trainers: Sequence[Trainer], processors: Iterable[Processor]
) -> list[Found]:
    """Every place of a conversation; empty where it was not seen."""
    steps = list(processors)
    found: list[Found] = []
    for trainer in trainers:
        found += await _trained(bus, store, conversation, trainer)
    for topic in dict.fromkeys(step.dropped for step in steps):
        found += [item async for item in _dropped(bus, topic, conversation)]
    for topic in dict.fromkeys(step.dead_letters for step in steps):
        found += [item async for item in _dead_letters(bus, topic, conversation)]
    if held_out(conversation, steps):
        for topic in dict.fromkeys(trainer.validation for trainer in trainers):
            found += [
                Found(what="validation", topic=r.topic, partition=r.partition, offset=r.offset)
                async for r in _packed(bus, topic, conversation)
            ]
    if not found and steps:
        written = {sink.topic for step in steps for sink in step.sinks}
        for topic in dict.fromkeys(step.source for step in steps if step.source not in written):
            async for record in _records(bus, topic):
                if record.key == conversation.encode():
                    found.append(Found(what="published", topic=topic, partition=record.partition, offset=record.offset))
    return found


def held_out(conversation: str, processors: Iterable[Processor]) -> bool:
    """Whether any step of the project keeps this conversation for validation."""
    shares = [step.build.validation_share for step in processors if isinstance(step.build, Features)]
    return any(is_validation(conversation, share) for share in shares)


async def _trained(bus: Bus, store: ObjectStore, conversation: str, trainer: Trainer) -> list[Found]:
    job = trainer.name
    top = await checkpoint.head(store, job)
    found: list[Found] = []
    begin: dict[TopicPartition, int] | None = None
    if top is not None:
        manifest = await checkpoint.read_manifest(store, top.ref)
        kept: dict[int, str] = {}
        async for ref, _ in checkpoint.chain(store, top.ref):
            kept.setdefault(ref.step, ref.manifest)
        for place in await lineage.of_conversation(store, manifest, conversation):
            holder = min((step for step in kept if step >= place.checkpoint_step), default=None)
            found.append(
                Found(
                    what="trained",
                    topic=place.topic,
                    partition=place.partition,
                    offset=place.offset,
                    details={
                        "job": job,
                        "step": place.step,
                        "checkpoint_step": place.checkpoint_step,
                        "oldest_kept_checkpoint": kept[holder] if holder is not None else None,
                    },
                )
            )
        begin = {}
        for name, offset in manifest.offsets.items():
            topic, _, partition = name.rpartition("/")
            begin[TopicPartition(topic, int(partition))] = offset
    async for record in _packed(bus, trainer.data, conversation, begin):
        found.append(
            Found(
                what="waiting",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                details={"job": job},
            )
        )
    return found


async def _packed(
    bus: Bus, topic: str, conversation: str, begin: dict[TopicPartition, int] | None = None
) -> AsyncIterator[Record]:
    """The packed sequences that hold the conversation, from `begin` on."""
    needle = conversation.encode()
    async for record in _records(bus, topic, begin):
        if needle not in (record.value or b""):  # ids are in the record as they are: most need no decoding
            continue
        try:
            if conversation in decode(record.value or b"").conversations:
                yield record
        except BadRecord:
            continue


async def _dropped(bus: Bus, topic: str, conversation: str) -> AsyncIterator[Found]:
    async for record in _records(bus, topic):
        if record.key not in (None, conversation.encode()):
            continue
        try:
            raw = orjson.loads(record.value or b"")
            if raw["conversation"] == conversation:
                yield Found(
                    what="dropped",
                    topic=raw["topic"],
                    partition=raw["partition"],
                    offset=raw["offset"],
                    details={"reason": raw["reason"], "processor": raw["processor"], "at_ms": raw.get("at_ms")},
                )
        except (orjson.JSONDecodeError, KeyError, TypeError):
            continue


async def _dead_letters(bus: Bus, topic: str, conversation: str) -> AsyncIterator[Found]:
    wanted = conversation.encode()
    async for record in _records(bus, topic):
        headers = dict(record.headers)
        if wanted in (headers.get("conversation"), record.key):
            text = {name: (value or b"").decode("utf-8", "replace") for name, value in headers.items()}
            yield Found(
                what="dead_letter",
                topic=topic,
                partition=record.partition,
                offset=record.offset,
                details={name: text.get(name) for name in ("error", "processor", "origin-topic", "origin-offset")},
            )


async def _records(bus: Bus, topic: str, begin: dict[TopicPartition, int] | None = None) -> AsyncIterator[Record]:
    """A topic's records; none where the topic is not there."""
    try:
        async for record in scan(bus, topic, begin=begin):
            yield record
    except NotFound:
        return
