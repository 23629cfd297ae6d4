"""What is on the dead-letter topic: records that no processor could take, with where they came from and why."""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from megaflow_stream.bus.api import Bus, Record, TopicPartition
from megaflow_stream.errors import NotFound
from megaflow_stream.observe.scan import scan
from megaflow_stream.observe.tail import describe


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A dead letter without its value. `id` is PARTITION/OFFSET on the dead-letter topic; what a foreign writer did
    not say is None."""

    id: str
    timestamp_ms: int
    processor: str | None
    origin_topic: str | None
    origin_partition: int | None
    origin_offset: int | None
    error: str | None
    attempt: int | None
    conversation: str | None

    @classmethod
    def of(cls, record: Record) -> DeadLetter:
        headers = {name: (value or b"").decode("utf-8", "replace") for name, value in record.headers}

        def number(name: str) -> int | None:
            return int(headers[name]) if headers.get(name, "").isdigit() else None

        return cls(
            id=f"{record.partition}/{record.offset}",
            timestamp_ms=record.timestamp,
            processor=headers.get("processor"),
            origin_topic=headers.get("origin-topic"),
            origin_partition=number("origin-partition"),
            origin_offset=number("origin-offset"),
            error=headers.get("error"),
            attempt=number("attempt"),
            conversation=headers.get("conversation"),
        )

    def matches(self, *, processor: str | None, error: str | None, topic: str | None) -> bool:
        """processor and topic are equal, error is part of the letter's, whatever its case."""
        return (
            (processor is None or processor == self.processor)
            and (topic is None or topic == self.origin_topic)
            and (error is None or error.lower() in (self.error or "").lower())
        )


async def list_letters(
    bus: Bus,
    *,
    limit: int | None = None,
    processor: str | None = None,
    error: str | None = None,
    origin: str | None = None,
    topic: str = "dlq",
) -> tuple[list[DeadLetter], int]:
    """The newest `limit` letters that match, oldest first, and how many match in all. None where there is no topic."""
    found: deque[DeadLetter] = deque(maxlen=limit)
    total = 0
    try:
        async for record in scan(bus, topic):
            letter = DeadLetter.of(record)
            if letter.matches(processor=processor, error=error, topic=origin):
                found.append(letter)
                total += 1
    except NotFound:
        return [], 0
    return sorted(found, key=lambda letter: letter.timestamp_ms), total


async def show_letter(bus: Bus, partition: int, offset: int, *, topic: str = "dlq") -> dict[str, Any]:
    """One letter as JSON, with all headers and its value. Raises `NotFound` where there is none at that place."""
    place = TopicPartition(topic, partition)
    if place in await bus.partitions(topic):
        end = min(offset + 1, (await bus.end_offsets([place]))[place])
        async with aclosing(scan(bus, topic, begin={place: offset}, end={place: end})) as records:
            async for record in records:
                return describe(record)
    raise NotFound(
        "there is no dead letter at this place",
        hint="`megaflow dlq list` shows those there are, each with its PARTITION/OFFSET",
        topic=topic,
        partition=partition,
        offset=offset,
    )
