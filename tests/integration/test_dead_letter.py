"""Dead letters that are larger than their topic takes, on a real broker: none is lost, none is tried for ever."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from megaflow_stream.bus import Bus, OutRecord, TopicDescription, TopicPartition
from megaflow_stream.bus.api import Headers
from megaflow_stream.definitions.processor import Rejected
from megaflow_stream.errors import BusError
from megaflow_stream.observe.dead_letters import list_letters, show_letter
from megaflow_stream.processing.batch import Batch
from megaflow_stream.processing.dead_letter import dead_letter
from tests.engine_cases.declared import plain

LIMIT = 200_000  # above the 128 KiB that the producer puts into a batch


@dataclass(frozen=True, kw_only=True)
class Came:
    """A record as it was read."""

    value: bytes | None
    topic: str = "conversations.raw"
    partition: int = 0
    offset: int = 0
    timestamp: int = 0
    key: bytes | None = b"c"
    headers: Headers = (("dataset", b"agent"), ("traceparent", b"00-1-2-01"))


@pytest.fixture
async def topic(bus: Bus) -> AsyncIterator[str]:
    name = f"dlq-{os.urandom(4).hex()}"
    await bus.create_topic(TopicDescription(name, 1, {"max.message.bytes": str(LIMIT)}))
    yield name
    await bus.delete_topic(name)


async def test_each_letter_is_accepted_and_says_where_the_whole_stands(bus: Bus, topic: str) -> None:
    came = Came(value=None)
    (fixed,) = _letters([came], topic)
    headers_bytes = sum(len(name) + len(value) + 10 for name, value in fixed.headers)
    at_most = LIMIT - headers_bytes - 2 * len("1") - 100  # the largest value that goes whole; offsets of two digits
    many = [
        replace(came, value=value, key=key, headers=headers)
        for value, key, headers in (
            (b"small", b"c", came.headers),
            (b"x" * at_most, b"c", came.headers),
            (b"y" * (at_most + 100), b"c", came.headers),
            (b"z" * 3_000_000, b"c", came.headers),
            (b"headers", b"c", [("theirs", b"h" * LIMIT)]),
            (b"key", b"k" * LIMIT, came.headers),
            (b"v" * LIMIT, b"k" * LIMIT, [("theirs", b"h" * LIMIT)]),
            (None, b"k" * LIMIT, ()),
        )
    ]
    many = [replace(record, offset=10 + number) for number, record in enumerate(many)]
    producer = await bus.producer(f"dead-{topic}")
    await producer.begin()
    await producer.commit(await producer.send_many(topic, 0, _letters(many, topic)))
    await producer.close()

    found, total = await list_letters(bus, topic=topic)
    assert (total, [letter.origin_offset for letter in found]) == (8, [record.offset for record in many])
    shown = [await show_letter(bus, 0, offset, topic=topic) for offset in range(8)]
    assert ["value-bytes" in letter["headers"] for letter in shown] == [False, False, *[True] * 6]
    assert [letter["headers"].get("left-out") for letter in shown] == [None] * 4 + ["key and headers"] * 4
    for record, letter in zip(many, shown, strict=True):
        value, headers = record.value or b"", letter["headers"]
        assert headers["origin-topic"] == record.topic
        assert headers["error"] == "no lexicon"
        assert value.decode().startswith(letter["value"] or "")
        if "value-bytes" in headers:
            assert headers["value-bytes"] == str(len(value))
            assert headers["value-sha256"] == hashlib.sha256(value).hexdigest()
        else:
            assert (letter["value"], letter["key"]) == (value.decode(), "c")
    assert len(shown[2]["value"]) > 0.9 * at_most
    assert shown[2]["headers"]["dataset"] == "agent"


async def test_a_letter_that_is_not_cut_would_be_refused_for_ever(bus: Bus, topic: str) -> None:
    letter = dead_letter(plain, Came(value=b"z" * LIMIT), Rejected(0, "no lexicon"), 1)
    producer = await bus.producer(f"dead-{topic}")
    await producer.begin()
    with pytest.raises(BusError, match="MessageSizeTooLarge"):
        await producer.commit(await producer.send_many(topic, 0, [letter]))
    await producer.close()


def _letters(records: list[Came], topic: str) -> list[OutRecord]:
    batch = Batch(begin=0, end=100, size_bytes=1, records=len(records))
    batch.rejected = [(record, Rejected(record.offset, "no lexicon"), 1) for record in records]
    processor = replace(plain, dead_letters=topic)
    out = batch.outputs(processor, TopicPartition(plain.source, 0), {topic: 1}, {topic: LIMIT})
    return out[topic, 0]
