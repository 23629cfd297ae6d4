"""Transactions on both buses: visibility, offsets, fencing."""

from __future__ import annotations

import asyncio

import pytest

from megaflow_stream.bus import OutRecord, TopicPartition
from megaflow_stream.errors import BusError, Fenced
from tests.contract.place import soon


async def ends(place, partition):
    """The end offset of each isolation: last stable offset, high watermark."""
    stable = await place.bus.end_offsets([partition])
    highest = await place.bus.end_offsets([partition], isolation="read_uncommitted")
    return stable[partition], highest[partition]


async def values(place, topic):
    return [record.value for record in await place.read(topic)]


async def committed_once(place, topic, sent):
    producer = await place.producer(place.name("id"))
    await producer.begin()
    await producer.commit([await producer.send(topic, value, partition=0) for value in sent])
    return producer


async def test_markers_take_offsets(place):
    topic = await place.topic()
    partition = TopicPartition(topic, 0)
    producer = await committed_once(place, topic, [b"a", b"b"])
    await producer.begin()
    await producer.commit(await producer.send_many(topic, 0, [OutRecord(b"c")]))
    await soon(lambda: ends(place, partition), (5, 5))
    assert [(r.offset, r.value) for r in await place.read(topic)] == [(0, b"a"), (1, b"b"), (3, b"c")]
    reader = await place.reader({partition: 0})
    for _ in range(100):
        await reader.fetch(timeout_seconds=0.05)
        if await reader.position(partition) == 5:
            break
    assert await reader.position(partition) == 5  # past the marker: a caught-up reader has lag 0


async def test_open_and_aborted_records_are_hidden(place):
    topic = await place.topic()
    partition = TopicPartition(topic, 0)
    await committed_once(place, topic, [b"before"])  # offset 0, marker 1
    await soon(lambda: ends(place, partition), (2, 2))
    producer = await place.producer(place.name("id"))
    await producer.begin()
    await asyncio.gather(*[await producer.send(topic, b"open", partition=0) for _ in range(3)])  # 2, 3, 4
    plain = await place.producer()
    await (await plain.send(topic, b"plain", partition=0))  # 5, behind the open transaction
    assert await ends(place, partition) == (2, 6)
    assert [r.value for r in await place.read(topic)] == [b"before"]
    assert [r.offset for r in await place.read(topic, isolation="read_uncommitted")] == [0, 2, 3, 4, 5]
    await producer.abort()
    await soon(lambda: ends(place, partition), (7, 7))
    assert [(r.offset, r.value) for r in await place.read(topic)] == [(0, b"before"), (5, b"plain")]
    assert len(await place.read(topic, isolation="read_uncommitted")) == 5
    await producer.begin()
    await producer.commit([await producer.send(topic, b"again", partition=0)])
    await soon(lambda: values(place, topic), [b"before", b"plain", b"again"])


async def test_a_transaction_shows_in_all_partitions_or_none(place):
    topic, other = await place.topic(partitions=2), await place.topic()
    producer = await place.producer(place.name("id"))
    await producer.begin()
    sent = [await producer.send(topic, b"x", partition=n) for n in (0, 1)] + [await producer.send(other, b"y")]
    await asyncio.gather(*sent)
    assert await place.read(topic) == await place.read(other) == []
    await producer.commit(sent)
    await soon(lambda: values(place, topic), [b"x", b"x"])
    await soon(lambda: values(place, other), [b"y"])


async def test_offsets_are_committed_with_the_transaction_or_not_at_all(place):
    source = await place.topic(partitions=2)
    first, second = await place.bus.partitions(source)
    group = place.name("group")
    producer = await place.producer(place.name("id"))
    await producer.begin()
    await producer.send_offsets(group, {first: 7, second: 3})
    assert await place.bus.committed(group) == {}
    await producer.commit([])
    await soon(lambda: place.bus.committed(group), {first: 7, second: 3})
    await producer.begin()
    await producer.send_offsets(group, {first: 9})
    await producer.abort()
    await place.producer(producer.transactional_id)  # the end is carried out when this has answered
    assert await (await place.client()).committed(group) == {first: 7, second: 3}


async def test_a_commit_with_a_failed_send_fails(place):
    topic = await place.topic(configs={"max.message.bytes": "5000"})
    (partition,) = await place.bus.partitions(topic)
    group = place.name("group")
    producer = await place.producer(place.name("id"))
    await producer.begin()
    sent = [await producer.send(topic, value, partition=0) for value in (b"good", b"x" * 6000, b"good")]
    await producer.send_offsets(group, {partition: 3})
    with pytest.raises(BusError):
        await producer.commit(sent)
    await producer.close()
    await place.producer(producer.transactional_id)  # its InitProducerId ends what was left open
    assert await place.read(topic) == []
    assert await place.bus.committed(group) == {}


@pytest.mark.parametrize("call", ["send", "send_many", "send_offsets", "commit", "abort"])
async def test_a_second_producer_of_an_id_fences_the_first(place, call):
    topic = await place.topic()
    (partition,) = await place.bus.partitions(topic)
    group, name = place.name("group"), place.name("id")
    old = await place.producer(name)
    await old.begin()
    await (await old.send(topic, b"old", partition=0))
    assert await ends(place, partition) == (0, 1)
    new = await (await place.client()).producer(name)
    place.keep(new)
    assert await ends(place, partition) == (2, 2)  # InitProducerId has ended the old transaction

    async def act():
        if call == "send":
            await (await old.send(topic, b"zombie", partition=0))
        elif call == "send_many":
            await asyncio.gather(*await old.send_many(topic, 0, [OutRecord(b"zombie")]))
        elif call == "send_offsets":
            await old.send_offsets(group, {partition: 100})
        elif call == "commit":
            await old.commit([])
        else:
            await old.abort()

    with pytest.raises(Fenced):
        await act()
    await new.begin()
    await new.commit([await new.send(topic, b"new", partition=0)])
    await soon(lambda: values(place, topic), [b"new"])
    assert await place.bus.committed(group) == {}


async def test_after_a_fence_everything_is_refused(place):
    topic = await place.topic()
    name = place.name("id")
    old = await place.producer(name)
    await old.begin()
    sent = [await old.send(topic, b"old", partition=0)]
    await asyncio.gather(*sent)
    await place.producer(name)
    with pytest.raises(Fenced):
        await old.commit(sent)

    async def once_more():
        await old.begin()
        await old.commit([await old.send(topic, b"zombie", partition=0)])

    with pytest.raises(Fenced):
        await once_more()
    assert await place.read(topic) == []


async def test_transactions_are_begun_before_they_are_used(place):
    topic = await place.topic()
    (partition,) = await place.bus.partitions(topic)
    producer = await place.producer(place.name("id"))
    with pytest.raises(Fenced):
        await producer.send(topic, b"v", partition=0)
    plain = await place.producer()
    with pytest.raises(Fenced):
        await plain.begin()
    fresh = await place.producer(place.name("id"))
    await fresh.begin()
    await fresh.commit([])  # nothing in it: no marker
    assert await ends(place, partition) == (0, 0)
    with pytest.raises(Fenced):
        await fresh.commit([])


async def test_a_producer_with_an_open_transaction_closes(place):
    topic = await place.topic()
    producer = await place.producer(place.name("id"))
    await producer.begin()
    await producer.send(topic, b"never", partition=0)
    async with asyncio.timeout(10):
        await producer.close()
    assert await place.read(topic) == []


async def test_only_after_the_new_producer_is_the_committed_offset_the_last_word(place):
    """The order of the engine: whoever asks before InitProducerId can be told too little."""
    source, sink = await place.topic(), await place.topic()
    (partition,) = await place.bus.partitions(source)
    group, name = place.name("group"), place.name("id")
    old = await place.producer(name)
    await old.begin()
    sent = [await old.send(sink, b"%d" % n, partition=0) for n in range(10)]
    await old.send_offsets(group, {partition: 10})
    early = await place.bus.committed(group)
    await old.commit(sent)
    await place.producer(name)
    assert early == {}
    assert await place.bus.committed(group) == {partition: 10}
    assert await values(place, sink) == [b"%d" % n for n in range(10)]
