"""Lag on a real broker: markers, aborted records, open transactions, estimates, what expired."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator

import pytest

from megaflow_stream.bus import Bus, TopicDescription, TopicPartition
from megaflow_stream.observe import lag as lags
from megaflow_stream.observe.lag import Follower, PartitionLag, measure


@pytest.fixture
async def topic(bus: Bus) -> AsyncIterator[str]:
    name = f"lag-{uuid.uuid4().hex[:8]}"
    await bus.create_topic(TopicDescription(name, 2))
    yield name
    await bus.delete_topic(name)


async def write(
    bus: Bus, topic: str, records: int, *, partition: int = 0, commit: bool = True, value: bytes = b"x"
) -> None:
    producer = await bus.producer(f"lag-{uuid.uuid4().hex}")
    await producer.begin()
    sent = [await producer.send(topic, value, partition=partition) for _ in range(records)]
    if commit:
        await producer.commit(sent)
    else:
        for future in sent:
            await future
        await producer.abort()
    await producer.close()


async def commit(bus: Bus, group: str, positions: dict[TopicPartition, int]) -> None:
    producer = await bus.producer(f"lag-{uuid.uuid4().hex}")
    await producer.begin()
    await producer.send_offsets(group, positions)
    await producer.commit([])
    await producer.close()


async def one(bus: Bus, topic: str, group: str, partition: int = 0) -> PartitionLag:
    found = await measure(bus, [Follower(group=group, topics=[topic])])
    return next(line for line in found if line.partition == partition)


async def test_a_reader_that_is_caught_up_has_no_lag_though_markers_and_aborted_records_follow(
    bus: Bus, topic: str
) -> None:
    await write(bus, topic, 5)
    place = TopicPartition(topic, 0)
    await commit(bus, topic, {place: 5})
    await write(bus, topic, 7, commit=False)
    found = await one(bus, topic, topic)
    assert found.stable_offset > 5
    assert (found.records, found.bytes, found.seconds, found.exact, found.position) == (0, 0, 0.0, True, 5)


async def test_unread_records_are_counted_without_what_was_aborted(bus: Bus, topic: str) -> None:
    await write(bus, topic, 5)
    await commit(bus, topic, {TopicPartition(topic, 0): 5})
    await write(bus, topic, 7, commit=False)
    await write(bus, topic, 3, value=b"abcd")
    found = await one(bus, topic, topic)
    assert (found.records, found.bytes, found.exact) == (3, 12, True)
    assert found.seconds is not None
    assert 0 <= found.seconds < 120


async def test_a_group_without_a_position_is_behind_from_the_beginning(bus: Bus, topic: str) -> None:
    await write(bus, topic, 4, partition=1)
    found = await one(bus, topic, "nobody", partition=1)
    assert (found.position, found.records) == (None, 4)
    assert (await one(bus, topic, "nobody", partition=0)).records == 0


async def test_an_open_transaction_is_shown_and_is_no_lag(bus: Bus, topic: str) -> None:
    await write(bus, topic, 2)
    await commit(bus, topic, {TopicPartition(topic, 0): 2})
    producer = await bus.producer(f"lag-{uuid.uuid4().hex}")
    await producer.begin()
    sent = await producer.send(topic, b"open", partition=0)
    await sent
    found = await one(bus, topic, topic)
    assert (found.records, found.open_transactions) == (0, 1)
    assert found.high_watermark > found.stable_offset
    await producer.commit([sent])
    await producer.close()
    found = await one(bus, topic, topic)
    assert (found.records, found.open_transactions) == (1, 0)


async def test_a_position_beyond_the_end_is_never_negative(bus: Bus, topic: str) -> None:
    await write(bus, topic, 2)
    ahead = {TopicPartition(topic, 0): 1_000}
    (found, _) = await measure(bus, [Follower(group="ahead", topics=[topic], positions=ahead)])
    assert (found.records, found.bytes, found.seconds) == (0, 0, 0.0)


async def test_a_large_gap_is_estimated_and_says_so(bus: Bus, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lags, "COUNTED_OFFSETS", 100)
    producer = await bus.producer()
    for _ in range(20):
        for future in [await producer.send(topic, bytes(1000), partition=0) for _ in range(100)]:
            await future
    await producer.close()
    found = await one(bus, topic, "nobody")
    assert not found.exact
    assert 1_000 <= found.records <= 3_000
    assert found.bytes == pytest.approx(found.records * 1000, rel=0.1)


async def test_a_topic_that_is_not_there_is_left_out(bus: Bus, topic: str) -> None:
    assert await measure(bus, [Follower(group="nobody", topics=["not-" + topic])]) == []


async def test_seconds_are_the_age_of_the_oldest_unread_record(bus: Bus, topic: str) -> None:
    class Later:
        def now(self) -> float:
            return time.time() + 500

        def monotonic(self) -> float:
            return time.monotonic()

        async def sleep(self, seconds: float) -> None: ...

    await write(bus, topic, 1)
    found = (await measure(bus, [Follower(group="nobody", topics=[topic])], clock=Later()))[0]
    assert found.seconds == pytest.approx(500, abs=60)
