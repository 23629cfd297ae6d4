"""Reading from a cluster in memory: partitions by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megaflow_stream.bus.api import Isolation, Record, TopicPartition
from megaflow_stream.errors import BusError, RecordsExpired
from megaflow_stream.testing.log import MemoryRecord, PartitionLog

if TYPE_CHECKING:
    from megaflow_stream.testing.cluster import MemoryCluster


class MemoryReader:
    """See `bus.api.Reader`."""

    def __init__(self, cluster: MemoryCluster, isolation: Isolation, partition_fetch_bytes: int) -> None:
        self._cluster, self._isolation = cluster, isolation
        self._partition_fetch_bytes = partition_fetch_bytes
        self._positions: dict[TopicPartition, int | None] = {}
        self._paused: set[TopicPartition] = set()
        self._moving = False  # a rebalance is under way: nothing is fetched
        self.closed = False

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._positions = {TopicPartition(*partition): offset for partition, offset in positions.items()}
        self._paused.clear()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._positions[self._own(partition, "seeking")] = offset
        self._cluster.changed.announce()

    def pause(self, *partitions: TopicPartition) -> None:
        self._paused.update([self._own(partition, "pausing") for partition in partitions])

    def resume(self, *partitions: TopicPartition) -> None:
        self._paused.difference_update([self._own(partition, "resuming") for partition in partitions])
        self._cluster.changed.announce()

    async def fetch(
        self, *, timeout_seconds: float = 0.2, max_records: int | None = None
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        await self._cluster.call("fetching")
        now = asyncio.get_running_loop().time
        until = now() + timeout_seconds
        while True:
            if self.closed:
                raise BusError("fetching: this reader is closed")
            found = {} if self._moving else self._take(max_records)
            if found or (left := until - now()) <= 0:
                return found
            await self._cluster.changed.wait(left)

    async def position(self, partition: TopicPartition) -> int:
        await asyncio.sleep(0)
        position = self._positions[self._own(partition, "asking for a position")]
        if position is None:
            raise BusError("asking for a position before it was sought", **partition._asdict())
        return position

    async def close(self) -> None:
        self.closed = True
        self._positions.clear()
        self._cluster.changed.announce()

    def _take(self, max_records: int | None) -> dict[TopicPartition, list[MemoryRecord]]:
        found: dict[TopicPartition, list[MemoryRecord]] = {}
        for partition, position in list(self._positions.items()):
            if partition in self._paused or partition.topic not in self._cluster.topics:
                continue
            if position is None:
                raise BusError("fetching: resumed before it was sought", **partition._asdict())
            log = self._cluster.log(partition)
            if not log.begin <= position <= log.end:
                if found:  # given out first; the error comes with the next call
                    return found
                raise self._expired(log, position)
            records, self._positions[partition] = log.read(
                position, self._isolation, max_records, self._partition_fetch_bytes
            )
            if records:
                found[partition] = records
                self._positions[partition] = self._positions.pop(partition)  # the others come first next time
            if max_records is not None:
                max_records -= len(records)
                if max_records <= 0:
                    break
        return found

    def _own(self, partition: TopicPartition, doing: str) -> TopicPartition:
        partition = TopicPartition(*partition)
        if partition not in self._positions:
            raise BusError(f"{doing}: the partition is not assigned to this reader", **partition._asdict())
        return partition

    def _expired(self, log: PartitionLog, position: int) -> RecordsExpired:
        return RecordsExpired(
            f"the position {position} is outside of what is retained: [{log.begin}, {log.end})",
            hint="records between the two are gone: raise the retention, or move the position on purpose",
            **log.partition._asdict(),
            offset=position,
        )
