"""A reader that fetches nothing though there are records is replaced; one that has nothing to fetch is left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megaflow_stream.bus.api import Record, TopicDescription, TopicPartition
from megaflow_stream.errors import ServiceUnreachable
from megaflow_stream.observe.stall import STALL_SECONDS, Stall
from megaflow_stream.testing import MemoryBus
from megaflow_stream.training.follow import follow

PLACE = TopicPartition("control", 0)


class Fast:
    """A clock on which every look is later than a stall may last."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        self.at += STALL_SECONDS + 1
        return self.at

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Silent:
    """A reader that fetches nothing, as if there were nothing."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)

    async def fetch(self, **more: Any) -> Mapping[TopicPartition, Sequence[Record]]:
        await asyncio.sleep(0)
        return {}


class FirstIsSilent:
    """A bus whose first reader is silent. readers: made so far."""

    def __init__(self, bus: Any) -> None:
        self.bus, self.readers = bus, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bus, name)

    async def reader(self, **more: Any) -> Any:
        self.readers += 1
        reader = await self.bus.reader(**more)
        return Silent(reader) if self.readers == 1 else reader


@pytest.fixture
async def bus() -> MemoryBus:
    bus = MemoryBus()
    await bus.create_topic(TopicDescription("control", 1))
    return bus


async def send(bus: MemoryBus) -> None:
    producer = await bus.producer()
    await (await producer.send("control", b"value", partition=0))
    await producer.close()


async def test_only_records_beyond_a_position_that_stands_still_are_a_stall(bus: MemoryBus) -> None:
    stall = Stall(bus, Fast())
    for _ in range(3):
        await stall.look({PLACE: 0})
    await send(bus)
    await send(bus)
    await stall.look({PLACE: 1})
    with pytest.raises(ServiceUnreachable, match=r"some up to offset 2 \(topic control, partition 0, offset 1\)"):
        await stall.look({PLACE: 1})
    await stall.look({PLACE: 2})
    await stall.look({PLACE: 2})


async def test_following_goes_on_past_a_silent_reader(bus: MemoryBus) -> None:
    first = FirstIsSilent(bus)
    taken: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
    following = asyncio.create_task(follow(first, "control", taken.set_result, Fast()))
    await send(bus)
    assert (await asyncio.wait_for(taken, 30)).value == b"value"
    assert first.readers == 2
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
