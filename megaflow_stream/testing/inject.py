"""Faults at exact places, instead of sleeps and luck: `cluster.inject`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaflow_stream.bus.api import TopicPartition

if TYPE_CHECKING:
    from megaflow_stream.testing.cluster import MemoryCluster


class Inject:
    """What goes wrong in a real cluster now and then, on demand.

    Each takes effect at once, or at the next call that it names, and then is over.
    """

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._aborted: set[str] = set()
        self._late: set[str] = set()
        self.unreachable_calls = 0

    def abort_next(self, transactional_id: str) -> None:
        """The next commit of this id aborts instead and raises `Fenced`, as after the broker's transaction timeout:
        the records stay in the log as aborted ones, the offsets are not committed."""
        self._aborted.add(transactional_id)

    def late_markers(self, transactional_id: str) -> None:
        """The next transaction of this id is decided without readers or `committed()` seeing it, as Kafka shows it a
        little late: until the id's next transaction or producer, or `MemoryCluster.write_markers`."""
        self._late.add(transactional_id)

    def fence(self, transactional_id: str) -> None:
        """Another producer takes the id now: the open transaction is aborted, every further call raises `Fenced`."""
        self._cluster.init_producer(transactional_id)

    def rebalance(self, group: str) -> None:
        """The group revokes all partitions and assigns them anew, one member further than before."""
        self._cluster.group(group).rebalance(turn=True)

    def redeliver(self, partition: TopicPartition, offset: int, *, group: str | None = None) -> None:
        """The committed offset of the partition goes back to `offset`, in this group or in all that had passed it, and
        they rebalance: records come again that were processed before."""
        partition = TopicPartition(*partition)
        for name, found in self._cluster.groups.items():
            if (group is None or name == group) and found.offsets.get(partition, -1) > offset:
                found.offsets[partition] = offset
                found.rebalance()

    def gap(self, partition: TopicPartition, n: int = 1) -> None:
        """The next `n` offsets of the partition are never used, as after compaction."""
        self._cluster.log(TopicPartition(*partition)).gap(n)
        self._cluster.changed.announce()

    def unreachable(self, calls: int = 1) -> None:
        """The next `calls` calls of any client raise `ServiceUnreachable`."""
        self.unreachable_calls = calls

    def takes_abort(self, transactional_id: str) -> bool:
        """Whether this commit is the one to be aborted. Asked by the producer."""
        found = transactional_id in self._aborted
        self._aborted.discard(transactional_id)
        return found

    def holds_markers(self, transactional_id: str) -> bool:
        """Whether this decision is the one to be shown late. Asked by the cluster."""
        found = transactional_id in self._late
        self._late.discard(transactional_id)
        return found
