"""Records of any topic as JSON, from where one likes: what kcat does, without a second program."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from megaflow_stream.bus.api import Bus, Headers, Record, TopicPartition
from megaflow_stream.errors import NotFound, UsageError
from megaflow_stream.observe.scan import scan


def readable(value: bytes | None) -> Any:
    """Bytes as JSON: the document that they are, else their text, else {"base64": ...}."""
    if value is None:
        return None
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return text(value)


def text(value: bytes | None) -> str | dict[str, str] | None:
    """Bytes as text where they are UTF-8 without control characters, else {"base64": ...}."""
    if value is None:
        return None
    try:
        decoded = value.decode()
    except UnicodeDecodeError:
        decoded = "\0"
    if any(character < " " and character not in "\t\r\n" for character in decoded):
        return {"base64": base64.b64encode(value).decode()}
    return decoded


def headers_document(headers: Headers) -> dict[str, Any]:
    """Headers by name; a name that comes more than once has the list of its values."""
    found: dict[str, list[Any]] = {}
    for name, value in headers:
        found.setdefault(name, []).append(text(value))
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def describe(record: Record) -> dict[str, Any]:
    """A record as JSON: topic, partition, offset, timestamp_ms, key, headers, value."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp,
        "key": text(record.key),
        "headers": headers_document(record.headers),
        "value": readable(record.value),
    }


async def tail(
    bus: Bus,
    topic: str,
    *,
    begin: str = "beginning",
    count: int | None = None,
    until_end: bool = False,
    partitions: Sequence[int] | None = None,
) -> AsyncGenerator[Record, None]:
    """Committed records of a topic, in order within each partition.

    begin: `beginning`, `end`, an offset N, or -N for the last N records of each partition.
    count: how many at most. until_end: whether to end at what was committed when the call began, or to go on.
    Raises `NotFound` without the topic or partition, `UsageError` for a wrong `begin`.
    """
    present = await bus.partitions(topic)
    wanted = [p for p in present if partitions is None or p.partition in partitions]
    if partitions is not None and len(wanted) < len(set(partitions)):
        raise NotFound(f"the topic has {len(present)} partitions, from 0 on", topic=topic)
    first, last = await bus.begin_offsets(wanted), await bus.end_offsets(wanted)
    positions = await _positions(bus, topic, begin, first, last)
    left = count
    if left == 0:
        return
    async with aclosing(scan(bus, topic, begin=positions, end=last)) as records_there:
        async for record in records_there:
            yield record
            if left is not None:
                left -= 1
                if left == 0:
                    return
    if until_end:
        return
    reader = await bus.reader()
    try:
        reader.assign({p: max(positions[p], last[p]) for p in wanted})
        while True:
            for records in (await reader.fetch(timeout_seconds=0.5)).values():
                for record in records:
                    yield record
                    if left is not None:
                        left -= 1
                        if left == 0:
                            return
    finally:
        await reader.close()


async def _positions(
    bus: Bus, topic: str, begin: str, first: dict[TopicPartition, int], last: dict[TopicPartition, int]
) -> dict[TopicPartition, int]:
    if begin == "beginning":
        return first
    if begin == "end":
        return last
    try:
        number = int(begin)
    except ValueError:
        raise UsageError(f"{begin!r} is no place to begin: beginning, end, an offset N, or -N") from None
    if number >= 0 and not begin.startswith("-"):
        return {p: max(number, first[p]) for p in first}
    return {p: await _last(bus, topic, p, first[p], last[p], -number) for p in first}


async def _last(bus: Bus, topic: str, partition: TopicPartition, first: int, last: int, count: int) -> int:
    """The offset of the count-th last record. Offsets have gaps, so a wider and wider end of the log is read."""
    width = count
    while True:
        start = max(first, last - width)
        offsets = [r.offset async for r in scan(bus, topic, begin={partition: start}, end={partition: last})]
        if count and len(offsets) >= count:
            return offsets[-count]
        if start == first or not count:
            return start
        width *= 4
