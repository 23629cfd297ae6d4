"""Topics on both buses: made, changed, grown, listed, deleted."""

from __future__ import annotations

import pytest

from megaflow_stream.bus import TopicDescription, TopicPartition
from megaflow_stream.errors import BusError, NotFound
from tests.contract.place import soon


async def test_creating_twice_changes_nothing(place):
    name = await place.topic(partitions=2, configs={"retention.ms": "1000"})
    assert not await place.bus.create_topic(TopicDescription(name, 5, {"retention.ms": "2000"}))
    assert (await place.bus.topics())[name] == TopicDescription(name, 2, {"retention.ms": "1000"})
    assert await place.bus.partitions(name) == [TopicPartition(name, 0), TopicPartition(name, 1)]
    other = await place.client()
    assert (await other.topics())[name].partitions == 2


async def test_altering_states_all_settings(place):
    name = await place.topic(configs={"retention.ms": "1000", "cleanup.policy": "compact"})
    for _ in range(2):
        await place.bus.alter_topic(name, {"retention.ms": "2000", "max.message.bytes": "9000000"})
        described = (await place.bus.topics())[name]
        assert described.configs == {"retention.ms": "2000", "max.message.bytes": "9000000"}


async def test_partitions_are_added_and_never_taken(place):
    name = await place.topic(partitions=2)
    for _ in range(2):
        await place.bus.add_partitions(name, 3)
        assert len(await place.bus.partitions(name)) == 3
    with pytest.raises(BusError):
        await place.bus.add_partitions(name, 1)
    partitions = await place.bus.partitions(name)
    assert await place.bus.begin_offsets(partitions) == dict.fromkeys(partitions, 0)
    assert await place.bus.end_offsets(partitions) == dict.fromkeys(partitions, 0)


async def test_a_deleted_topic_is_gone(place):
    name = await place.topic()
    await place.bus.delete_topic(name)

    async def there() -> bool:
        return name in await place.bus.topics()

    await soon(there, False)
    with pytest.raises(NotFound):
        await place.bus.partitions(name)
