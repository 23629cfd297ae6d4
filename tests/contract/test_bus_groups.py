"""Consumer groups on both buses: assignments come paused, partitions move, offsets stay."""

from __future__ import annotations

import asyncio

import pytest

from megaflow_stream.bus import OutRecord, TopicPartition
from megaflow_stream.errors import BusError
from tests.contract.place import join, soon, until


async def filled(place, partitions=4, each=5):
    topic = await place.topic(partitions=partitions)
    producer = await place.producer()
    for number in range(partitions):
        await asyncio.gather(*await producer.send_many(topic, number, [OutRecord(b"%d" % n) for n in range(each)]))
    return topic, await place.bus.partitions(topic)


async def test_new_partitions_are_paused_until_they_are_sought_and_resumed(place):
    topic, partitions = await filled(place, partitions=2)
    group = place.name("group")
    member = await join(place, group, [topic])
    await until(lambda: member.owned == set(partitions), member.reader)
    assert member.told[-1] == ("assigned", partitions)
    first, second = partitions
    assert await member.reader.committed(first) is None
    assert await member.reader.fetch(timeout_seconds=0.1) == {}
    with pytest.raises(BusError, match="sought"):
        await member.reader.position(first)
    member.reader.seek(first, 2)
    assert await member.reader.fetch(timeout_seconds=0.1) == {}
    member.reader.resume(first)
    found = {}
    async with asyncio.timeout(30):
        while first not in found:
            found |= await member.reader.fetch()
    assert [r.offset for r in found[first]] == [2, 3, 4]
    assert second not in found
    assert await member.reader.position(first) == 5

    member.reader.resume(second)
    with pytest.raises(BusError, match="sought"):
        await fetched_or_refused(member.reader)
    member.reader.seek(second, 0)

    producer = await place.producer(place.name("id"))
    await producer.begin()
    await producer.send_offsets(group, {first: 4})
    assert await member.reader.committed(first) is None
    await producer.commit([])
    await soon(lambda: member.reader.committed(first), 4)
    assert await member.reader.committed(second) is None


async def fetched_or_refused(reader):
    async with asyncio.timeout(30):
        while not await reader.fetch():
            pass


async def test_a_fetch_ends_while_another_member_holds_the_rebalance_up(place):
    topic, partitions = await filled(place)
    group = place.name("group")
    one = await join(place, group, [topic])
    await until(lambda: one.owned == set(partitions), one.reader)
    asked, held = asyncio.Event(), asyncio.Event()

    async def slow(_):
        asked.set()
        await held.wait()

    one.on_revoked = slow
    other = await join(place, group, [topic])
    async with asyncio.timeout(30):
        await asked.wait()
        assert await one.reader.fetch(timeout_seconds=0) == {}
        assert await other.reader.fetch(timeout_seconds=0) == {}
    assert not other.owned
    held.set()
    await until(lambda: len(other.owned) == 2, one.reader, other.reader)


async def test_two_members_share_and_one_that_leaves_hands_over(place):
    topic, partitions = await filled(place)
    group = place.name("group")
    one = await join(place, group, [topic])
    await until(lambda: one.owned == set(partitions), one.reader)
    for partition in partitions:
        one.reader.seek(partition, 0)
        one.reader.resume(partition)
    other = await join(place, group, [topic], await place.client())
    both = (one.reader, other.reader)
    await until(lambda: len(one.owned) == len(other.owned) == 2, *both)
    assert one.owned | other.owned == set(partitions)
    assert ("revoked", partitions) in [(what, sorted(which)) for what, which in one.told]  # eager: all were given up
    # Paused again, whatever they were before: every assignment starts over.
    assert await one.reader.fetch(timeout_seconds=0.1) == {}
    lost = min(other.owned)
    with pytest.raises(BusError):
        one.reader.seek(lost, 0)
    await other.reader.close()
    assert other.owned  # closing tells nobody: whoever closes knows
    await until(lambda: one.owned == set(partitions), one.reader)
    one.reader.seek(lost, 1)
    one.reader.resume(lost)
    found = {}
    async with asyncio.timeout(30):
        while not found:
            found = await one.reader.fetch()
    assert {TopicPartition(*p): [r.offset for r in rs] for p, rs in found.items()} == {lost: [1, 2, 3, 4]}


async def test_a_member_more_than_there_are_partitions_waits(place):
    topic, partitions = await filled(place, partitions=1)
    group = place.name("group")
    members = [await join(place, group, [topic]) for _ in range(2)]
    readers = [member.reader for member in members]

    def told():
        return all(m.told and m.told[-1][0] == "assigned" for m in members)

    await until(lambda: told() and sum(len(m.owned) for m in members) == 1, *readers)
    owner, idle = sorted(members, key=lambda m: -len(m.owned))
    assert owner.owned == set(partitions)
    assert await idle.reader.fetch(timeout_seconds=0.05) == {}
    await owner.reader.close()
    await until(lambda: idle.owned == set(partitions), idle.reader)


async def test_a_callback_that_raises_does_not_end_the_membership(place, caplog):
    topic, partitions = await filled(place, partitions=1)
    group = place.name("group")
    member = await join(place, group, [topic])
    await until(lambda: member.owned == set(partitions), member.reader)

    async def broken(_):
        raise RuntimeError("by the test")

    member.on_revoked = broken
    other = await join(place, group, [topic])
    await until(lambda: len(other.told) > 0 and other.told[-1][0] == "assigned", member.reader, other.reader)
    assert "giving up partitions" in caplog.text
    assert member.told[-1][0] == "assigned"


async def test_a_group_reads_two_topics(place):
    (one, ones), (other, others) = await filled(place, partitions=2), await filled(place, partitions=1)
    member = await join(place, place.name("group"), [one, other])
    await until(lambda: member.owned == {*ones, *others}, member.reader)
