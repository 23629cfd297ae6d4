"""Consumer groups in memory: generations, eager rebalances, committed offsets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megaflow_stream.bus.api import Assignment, TopicPartition
from megaflow_stream.testing.reader import MemoryReader

if TYPE_CHECKING:
    from megaflow_stream.testing.cluster import MemoryCluster

log = logging.getLogger(__name__)


class Group:
    """One consumer group.

    A rebalance is eager: every member gives up everything, then the partitions are dealt out in turn (round robin)
    to the members in the order in which they joined. A member that does not return from `on_revoked` holds it up;
    Kafka would throw it out after its rebalance timeout.
    """

    def __init__(self, cluster: MemoryCluster, name: str) -> None:
        self._cluster, self.name = cluster, name
        self.generation = 0
        self.members: list[MemoryGroupReader] = []
        self.offsets: dict[TopicPartition, int] = {}
        self._wanted = False
        self._turn = 0
        self._task: asyncio.Task[None] | None = None

    def join(self, member: MemoryGroupReader) -> None:
        self.members.append(member)
        self.rebalance()

    def leave(self, member: MemoryGroupReader) -> None:
        if member in self.members:
            self.members.remove(member)
            self.rebalance()

    def rebalance(self, *, turn: bool = False) -> None:
        """Asks for a new generation. turn: deal from one member further on, so that partitions change hands."""
        self._turn += turn
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._rebalance())

    async def settled(self) -> None:
        """Returns when no rebalance is wanted or under way."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def _rebalance(self) -> None:
        while self._wanted:
            self._wanted = False
            self.generation += 1
            await asyncio.gather(*(member.revoke() for member in self.members))
            shares = self.deal()
            await asyncio.gather(*(member.take(share) for member, share in shares.items() if member in self.members))

    def deal(self) -> Mapping[MemoryGroupReader, list[TopicPartition]]:
        """Every partition of the members' topics to one member that reads its topic."""
        shares: dict[MemoryGroupReader, list[TopicPartition]] = {member: [] for member in self.members}
        topics = sorted({topic for member in self.members for topic in member.topics} & set(self._cluster.topics))
        place = self._turn
        for partition in (log.partition for topic in topics for log in self._cluster.topic(topic).logs):
            while partition.topic not in self.members[place % len(self.members)].topics:
                place += 1
            shares[self.members[place % len(self.members)]].append(partition)
            place += 1
        return shares


class MemoryGroupReader(MemoryReader):
    """A member of a consumer group. See `bus.api.GroupReader`."""

    def __init__(
        self,
        cluster: MemoryCluster,
        group: Group,
        topics: Sequence[str],
        assignment: Assignment,
        partition_fetch_bytes: int,
    ) -> None:
        super().__init__(cluster, "read_committed", partition_fetch_bytes)
        self._group, self.topics, self._assignment = group, tuple(topics), assignment

    async def committed(self, partition: TopicPartition) -> int | None:
        await self._cluster.call("reading the committed offset")
        return self._group.offsets.get(TopicPartition(*partition))

    async def close(self) -> None:
        """Leaves the group. As with aiokafka, on_revoked is not called."""
        if not self.closed:
            await super().close()
            self._group.leave(self)

    async def revoke(self) -> None:
        """Kafka's clients call on_revoked first, while they still have the partitions, then forget them."""
        self._moving = True
        try:
            await self._assignment.on_revoked(sorted(self._positions))
        except Exception:
            log.exception("giving up partitions")
        self._positions.clear()
        self._paused.clear()

    async def take(self, partitions: Sequence[TopicPartition]) -> None:
        """New partitions are paused, and stand nowhere until they are sought."""
        self._positions = dict.fromkeys(partitions)
        self._paused = set(partitions)
        try:
            await self._assignment.on_assigned(list(partitions))
        except Exception:
            log.exception("taking partitions")
        self._moving = False
        self._cluster.changed.announce()
