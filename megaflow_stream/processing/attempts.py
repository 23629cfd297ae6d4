"""Calling a handler on a batch until each record has an answer or a reason.

A batch that fails is halved until the failing records are found; only those are given up, after `tries` attempts alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megaflow_stream.bus.api import Record, TopicPartition
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.processing.compute import HandlerDied, HandlerRaised
from megaflow_stream.processing.frames import Answer, input_batch

if TYPE_CHECKING:
    from megaflow_stream.processing.member import Member

# What a record's batch adds to it on the broker, headers of other records aside.
_FRAME_BYTES = 100

Outcome = tuple[Sequence[Record], Answer | None, str]
_BACKOFF_SECONDS = 0.05


def _check(answer: Answer, records: Sequence[Record], limits: Mapping[str, int]) -> None:
    """Raises `HandlerRaised` for an answer that no transaction could ever write: it would be tried for ever."""
    if answer.rejected:
        offsets = {record.offset for record in records}
        for rejected in answer.rejected:
            if rejected.offset not in offsets:
                raise HandlerRaised(f"the handler rejects offset {rejected.offset}, which is not in its batch")
    for (topic, _), made in answer.records.items():
        limit = limits.get(topic)
        if limit is None:
            continue
        for value, key, headers in made:
            if value is not None and len(value) > limit // 2:  # few are: the rest is not looked at
                size = len(value) + len(key or b"") + sum(len(n) + len(v or b"") for n, v in headers) + _FRAME_BYTES
                if size > limit:
                    raise HandlerRaised(f"an output of {size} bytes is too large for {topic}, which takes {limit}")


async def attempt(
    member: Member,
    processor: Processor,
    tp: TopicPartition,
    records: Sequence[Record],
    tries: int = 0,
    part: bool = False,
) -> list[Outcome]:
    """[(records, answer, error)], in order; a record without an answer stands alone, with its error.

    part: these are a part of a batch that has failed."""
    batch = input_batch(processor, records, tp.topic, tp.partition)
    try:
        answer = await member.call(batch)
        _check(answer, records, member.limits)
        return [(records, answer, "")]
    except (HandlerRaised, HandlerDied) as error:
        if len(records) == 1:
            if tries + 1 < processor.tries:
                await asyncio.sleep(_BACKOFF_SECONDS * 2**tries)
                return await attempt(member, processor, tp, records, tries + 1)
            return [(records, None, error.message)]
        if isinstance(error, HandlerDied) and not tries and not part:  # perhaps not the batch's fault: a stray kill
            return await attempt(member, processor, tp, records, 1)
        half = len(records) // 2
        first = await attempt(member, processor, tp, records[:half], part=True)
        return first + await attempt(member, processor, tp, records[half:], part=True)
