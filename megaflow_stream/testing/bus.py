"""A client of a cluster in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaflow_stream.bus.api import Assignment, Isolation, TopicDescription, TopicPartition
from megaflow_stream.errors import BusError
from megaflow_stream.testing.cluster import MemoryCluster
from megaflow_stream.testing.group import MemoryGroupReader
from megaflow_stream.testing.producer import MemoryProducer
from megaflow_stream.testing.reader import MemoryReader


class MemoryBus:
    """See `bus.api.Bus`. Several buses on one `MemoryCluster` are several clients of it."""

    def __init__(self, cluster: MemoryCluster | None = None) -> None:
        self.cluster = cluster or MemoryCluster()

    async def producer(
        self, transactional_id: str | None = None, *, transaction_timeout_seconds: float = 20.0
    ) -> MemoryProducer:
        """No transaction times out by itself: `cluster.inject.abort_next`."""
        await self.cluster.call(f"starting the producer {transactional_id or ''}".rstrip())
        epoch = 0 if transactional_id is None else self.cluster.init_producer(transactional_id)
        return MemoryProducer(self.cluster, transactional_id, epoch)

    async def reader(
        self, *, isolation: Isolation = "read_committed", partition_fetch_bytes: int = 1 << 20
    ) -> MemoryReader:
        await self.cluster.call("starting a reader")
        return MemoryReader(self.cluster, isolation, partition_fetch_bytes)

    async def group_reader(
        self,
        group: str,
        topics: Sequence[str],
        assignment: Assignment,
        *,
        session_seconds: float = 10.0,
        heartbeat_seconds: float = 3.0,
        partition_fetch_bytes: int = 1 << 20,
    ) -> MemoryGroupReader:
        """No session runs out by itself: `cluster.inject.rebalance`."""
        await self.cluster.call("starting a group reader")
        found = self.cluster.group(group)
        member = MemoryGroupReader(self.cluster, found, topics, assignment, partition_fetch_bytes)
        found.join(member)
        return member

    async def partitions(self, topic: str) -> list[TopicPartition]:
        await self.cluster.call("asking for partitions")
        return [log.partition for log in self.cluster.topic(topic).logs]

    async def begin_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        await self.cluster.call("asking for begin offsets")
        return {partition: log.begin for partition, log in self.cluster.logs_of(partitions).items()}

    async def end_offsets(
        self, partitions: Sequence[TopicPartition], *, isolation: Isolation = "read_committed"
    ) -> dict[TopicPartition, int]:
        await self.cluster.call("asking for end offsets")
        return {partition: log.limit(isolation) for partition, log in self.cluster.logs_of(partitions).items()}

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        await self.cluster.call(f"asking for the offsets of {group}")
        return self.cluster.committed(group)

    async def topics(self) -> dict[str, TopicDescription]:
        await self.cluster.call("listing topics")
        return {
            name: TopicDescription(name, len(topic.logs), dict(topic.configs))
            for name, topic in self.cluster.topics.items()
        }

    async def create_topic(self, topic: TopicDescription, *, replication_factor: int = 1) -> bool:
        await self.cluster.call("creating a topic")
        return self.cluster.create(topic.name, topic.partitions, topic.configs)

    async def alter_topic(self, name: str, configs: Mapping[str, str]) -> None:
        await self.cluster.call("changing a topic")
        self.cluster.topic(name).configs = dict(configs)

    async def add_partitions(self, name: str, total: int) -> None:
        await self.cluster.call("adding partitions")
        there = len(self.cluster.topic(name).logs)
        if total < there:
            raise BusError(f"adding partitions: the topic has {there}, more than {total}", topic=name)
        if total > there:
            self.cluster.grow(name, total)

    async def delete_topic(self, name: str) -> None:
        await self.cluster.call("deleting a topic")
        self.cluster.delete(name)

    async def close(self) -> None:
        """Holds nothing."""
