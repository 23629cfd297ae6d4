"""Calling a handler on a batch until each record has an answer or a reason.

A batch that fails is halved until the failing records are found; only those are given up, after `tries` attempts alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaflow_stream.bus.api import Record, TopicPartition
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.processing.compute import HandlerDied, HandlerRaised
from megaflow_stream.processing.frames import Answer, input_batch

if TYPE_CHECKING:
    from megaflow_stream.processing.member import Member

Outcome = tuple[Sequence[Record], Answer | None, str]
_BACKOFF_SECONDS = 0.05


async def attempt(
    member: Member, processor: Processor, tp: TopicPartition, records: Sequence[Record], tries: int = 0
) -> list[Outcome]:
    """[(records, answer, error)], in order; a record without an answer stands alone, with its error."""
    batch = input_batch(processor, records, tp.topic, tp.partition)
    try:
        return [(records, await member.call(batch), "")]
    except (HandlerRaised, HandlerDied) as error:
        if len(records) == 1:
            if tries + 1 < processor.tries:
                await asyncio.sleep(_BACKOFF_SECONDS * 2**tries)
                return await attempt(member, processor, tp, records, tries + 1)
            return [(records, None, error.message)]
        if isinstance(error, HandlerDied) and not tries:  # perhaps not the batch's fault: a stray kill
            return await attempt(member, processor, tp, records, 1)
        half = len(records) // 2
        first = await attempt(member, processor, tp, records[:half])
        return first + await attempt(member, processor, tp, records[half:])
