"""A cluster of either kind, with what a contract test asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition as KafkaPartition

from megaflow_stream.bus import Bus, GroupReader, Producer, Reader, Record, TopicDescription, TopicPartition
from megaflow_stream.testing import MemoryBus

PATIENCE_SECONDS = 30.0


class Place:
    """A cluster with topics of this test's own. What it hands out is closed when the test ends."""

    def __init__(self, bus: Bus, client: Callable[[], Awaitable[Bus]]) -> None:
        self.bus, self._client = bus, client
        self._opened: list[Any] = []
        self.topics: list[str] = []

    def name(self, what: str = "contract") -> str:
        return f"{what}.{uuid.uuid4().hex[:12]}"

    async def client(self) -> Bus:
        """Another client of the same cluster."""
        return self.keep(await self._client())

    async def topic(self, partitions: int = 1, configs: Mapping[str, str] | None = None) -> str:
        name = self.name()
        assert await self.bus.create_topic(TopicDescription(name, partitions, configs or {}))
        self.topics.append(name)
        return name

    async def producer(self, transactional_id: str | None = None) -> Producer:
        return self.keep(await self.bus.producer(transactional_id))

    async def reader(self, positions: Mapping[TopicPartition, int], **options: Any) -> Reader:
        reader = self.keep(await self.bus.reader(**options))
        reader.assign(positions)
        return reader

    async def read(self, topic: str, **options: Any) -> list[Record]:
        """Everything readable of a topic, partition by partition."""
        partitions = await self.bus.partitions(topic)
        begins = await self.bus.begin_offsets(partitions)
        ends = await self.bus.end_offsets(partitions, **options)
        reader = await self.reader(begins, **options)
        found = await take(reader, ends)
        return [record for partition in partitions for record in found.get(partition, [])]

    async def truncate(self, partition: TopicPartition, offset: int) -> None:
        """Makes the log of a partition begin at `offset`."""
        if isinstance(self.bus, MemoryBus):
            self.bus.cluster.truncate(partition, offset)
            return
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bus.bootstrap_servers)  # type: ignore[attr-defined]
        await admin.start()
        await admin.delete_records({KafkaPartition(*partition): RecordsToDelete(before_offset=offset)})
        await admin.close()

    def keep(self, opened: Any) -> Any:
        self._opened.append(opened)
        return opened

    async def close(self) -> None:
        for opened in reversed(self._opened):
            await opened.close()
        for topic in self.topics:
            with contextlib.suppress(Exception):
                await self.bus.delete_topic(topic)
        await self.bus.close()


class Member:
    """What a group member was told."""

    def __init__(self) -> None:
        self.owned: set[TopicPartition] = set()
        self.told: list[tuple[str, list[TopicPartition]]] = []
        self.reader: GroupReader

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.told.append(("assigned", list(partitions)))
        self.owned |= set(partitions)

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self.told.append(("revoked", list(partitions)))
        self.owned -= set(partitions)


async def join(place: Place, group: str, topics: Sequence[str], bus: Bus | None = None) -> Member:
    member = Member()
    member.reader = place.keep(
        await (bus or place.bus).group_reader(group, topics, member, session_seconds=6.0, heartbeat_seconds=0.3)
    )
    return member


async def soon(ask: Callable[[], Awaitable[Any]], expected: Any) -> None:
    """Asks until the answer is the expected one: Kafka writes a transaction's markers after it has answered."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await ask() != expected:
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool], *readers: Reader) -> None:
    """Fetches, as an engine does, until the condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)
            for reader in readers:
                await reader.fetch(timeout_seconds=0.01)


async def take(reader: Reader, ends: Mapping[TopicPartition, int]) -> dict[TopicPartition, list[Record]]:
    """Fetches until each position has reached its end."""
    found: dict[TopicPartition, list[Record]] = {}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while [p for p, end in ends.items() if await reader.position(p) < end]:
            for partition, records in (await reader.fetch()).items():
                found.setdefault(TopicPartition(*partition), []).extend(records)
    return found
