"""Records on both buses: order, keys, headers, batches, partitions, errors of sending."""

from __future__ import annotations

import asyncio

import pytest

from megaflow_stream.bus import OutRecord, TopicPartition
from megaflow_stream.errors import BusError, NotFound, RecordsExpired


async def test_records_come_in_order_as_they_were_sent(place):
    topic = await place.topic()
    producer = await place.producer()
    sent = [await producer.send(topic, b"%d" % n, key=b"k%d" % n, partition=0) for n in range(50)]
    nothing = await producer.send(topic, None, key=b"gone", partition=0, headers=[("a", b"1"), ("a", b"2")])
    assert await asyncio.gather(*sent) == list(range(50))
    assert await nothing == 50
    records = await place.read(topic)
    assert [(r.offset, r.key, r.value) for r in records[:50]] == [(n, b"k%d" % n, b"%d" % n) for n in range(50)]
    last = records[50]
    assert (last.topic, last.partition, last.value, list(last.headers)) == (topic, 0, None, [("a", b"1"), ("a", b"2")])
    assert list(records[0].headers) == []
    assert last.timestamp > 1_600_000_000_000


async def test_a_null_key_stays_null(place):
    topic = await place.topic(partitions=3)
    producer = await place.producer()
    await asyncio.gather(*[await producer.send(topic, b"v") for _ in range(6)])
    assert [r.key for r in await place.read(topic)] == [None] * 6


async def test_the_same_key_goes_to_the_same_partition_as_anywhere_in_kafka(place):
    topic = await place.topic(partitions=7)
    producer = await place.producer()
    keys = [bytes(range(n)) for n in range(20)] + [b"\xff" * 16, "größer".encode()]
    await asyncio.gather(*[await producer.send(topic, b"", key=key) for key in keys])
    found = {record.key: record.partition for record in await place.read(topic)}
    # The numbers that aiokafka and the bus in memory, which share no code, both give.
    expected = [2, 0, 5, 6, 2, 4, 5, 4, 6, 1, 3, 0, 3, 0, 3, 5, 2, 2, 2, 4, 4, 5]
    assert [found[key] for key in keys] == expected


async def test_many_records_larger_together_than_a_batch(place):
    topic = await place.topic(partitions=2)
    producer = await place.producer()
    many = [OutRecord(b"%06d" % n * 100, b"%d" % n, [("n", b"%d" % n)]) for n in range(1000)]
    many.insert(500, OutRecord(b"x" * 300_000))  # alone larger than a batch
    await asyncio.gather(*await producer.send_many(topic, 1, many))
    records = await place.read(topic)
    assert [(r.partition, r.value, r.key, list(r.headers)) for r in records] == [
        (1, value, key, list(headers)) for value, key, headers in many
    ]


async def test_a_record_that_is_too_large_fails_alone(place):
    topic = await place.topic(configs={"max.message.bytes": "5000"})
    producer = await place.producer()
    too_large = await producer.send(topic, b"x" * 6000, partition=0)
    with pytest.raises(BusError) as caught:
        await too_large
    assert not caught.value.retriable
    assert "`max_message`" in caught.value.hint
    assert caught.value.where["topic"] == topic
    await (await producer.send(topic, b"small", partition=0))
    assert [r.value for r in await place.read(topic)] == [b"small"]


async def test_after_a_cancelled_send_a_hundred_succeed(place):
    topic = await place.topic()
    producer = await place.producer()
    cancelled = await producer.send(topic, b"first", partition=0)
    cancelled.cancel()
    task = asyncio.ensure_future(producer.send(topic, b"second", partition=0))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(*[await producer.send(topic, b"%d" % n, partition=0) for n in range(100)])
    values = [r.value for r in await place.read(topic)]
    assert [v for v in values if v not in (b"first", b"second")] == [b"%d" % n for n in range(100)]


async def test_a_seek_drops_what_was_fetched(place):
    topic = await place.topic()
    partition = TopicPartition(topic, 0)
    producer = await place.producer()
    await asyncio.gather(*[await producer.send(topic, b"%d" % n, partition=0) for n in range(20)])
    reader = await place.reader({partition: 5})
    first = await one(reader, partition, max_records=3)
    assert [r.offset for r in first] == [5, 6, 7]
    assert await reader.position(partition) == 8
    reader.pause(partition)
    assert await reader.fetch(timeout_seconds=0.05) == {}
    reader.seek(partition, 2)
    assert await reader.fetch(timeout_seconds=0.05) == {}
    reader.resume(partition)
    assert [r.offset for r in await one(reader, partition, max_records=4)] == [2, 3, 4, 5]
    reader.seek(partition, 20)
    assert await reader.fetch(timeout_seconds=0.05) == {}
    await (await producer.send(topic, b"new", partition=0))
    assert [r.value for r in await one(reader, partition)] == [b"new"]


async def test_max_records_and_no_partition_starves(place):
    topic = await place.topic(partitions=3)
    producer = await place.producer()
    for number in range(3):
        await asyncio.gather(*await producer.send_many(topic, number, [OutRecord(b"v")] * 40))
    reader = await place.reader(dict.fromkeys(await place.bus.partitions(topic), 0))
    seen: dict[int, int] = {}
    for _ in range(200):
        records = [r for rs in (await reader.fetch(max_records=10)).values() for r in rs]
        assert len(records) <= 10
        for record in records:
            assert record.offset == seen.get(record.partition, 0)
            seen[record.partition] = record.offset + 1
        if sum(seen.values()) == 120:
            break
    assert seen == {0: 40, 1: 40, 2: 40}


async def test_assign_replaces_what_was_assigned(place):
    topic = await place.topic(partitions=2)
    producer = await place.producer()
    for number in range(2):
        await (await producer.send(topic, b"%d" % number, partition=number))
    one_, other = await place.bus.partitions(topic)
    reader = await place.reader({one_: 0})
    assert [r.value for r in await one(reader, one_)] == [b"0"]
    reader.assign({other: 0})
    assert [r.value for r in await one(reader, other)] == [b"1"]
    for call in (reader.pause, reader.resume, lambda partition: reader.seek(partition, 0)):
        with pytest.raises(BusError):
            call(one_)
    with pytest.raises(BusError):
        await reader.position(one_)


async def test_positions_outside_of_the_log_are_errors(place):
    topic = await place.topic()
    (partition,) = await place.bus.partitions(topic)
    producer = await place.producer()
    await asyncio.gather(*[await producer.send(topic, b"%d" % n, partition=0) for n in range(10)])
    await place.truncate(partition, 6)
    assert await place.bus.begin_offsets([partition]) == {partition: 6}
    assert [r.offset for r in await place.read(topic)] == [6, 7, 8, 9]
    for position in (3, 25):
        reader = await place.reader({partition: position})
        with pytest.raises(RecordsExpired) as caught:
            await one(reader, partition)
        assert caught.value.where["offset"] == position
        assert "6" in str(caught.value)
        reader.seek(partition, 6)
        assert (await one(reader, partition))[0].offset == 6


async def test_a_closed_reader_or_producer_says_so(place):
    topic = await place.topic()
    reader = await place.reader({TopicPartition(topic, 0): 0})
    producer = await place.producer()
    await reader.close()
    await producer.close()
    with pytest.raises(BusError):
        await reader.fetch()
    with pytest.raises(BusError):
        await producer.send(topic, b"v", partition=0)
    await reader.close()
    await producer.close()


async def test_what_is_not_there(place):
    with pytest.raises(NotFound) as caught:
        await place.bus.partitions("nobody.made.this")
    assert caught.value.where["topic"] == "nobody.made.this"
    for call in (
        place.bus.delete_topic("nobody.made.this"),
        place.bus.add_partitions("nobody.made.this", 3),
        place.bus.alter_topic("nobody.made.this", {}),
    ):
        with pytest.raises(NotFound):
            await call
    assert await place.bus.committed("nobody.reads.this") == {}
    assert await place.bus.end_offsets([]) == {}


async def one(reader, partition, **options):
    """The next records of the only partition that has any."""
    async with asyncio.timeout(30):
        while True:
            if found := await reader.fetch(**options):
                assert list(found) == [partition]
                return found[partition]
