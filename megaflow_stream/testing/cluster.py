"""A cluster in memory: the topics, groups and producer epochs that several buses share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megaflow_stream.bus.api import Headers, Isolation, TopicPartition
from megaflow_stream.bus.partitioner import partition_of
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.errors import Fenced, NotFound, ServiceUnreachable
from megaflow_stream.testing.group import Group
from megaflow_stream.testing.inject import Inject
from megaflow_stream.testing.log import MemoryRecord, PartitionLog, Transaction
from megaflow_stream.testing.signal import Signal

if TYPE_CHECKING:
    from megaflow_stream.testing.bus import MemoryBus


@dataclass(kw_only=True)
class MemoryTopic:
    """A topic: its partitions' logs, and the settings that differ from Kafka's defaults."""

    name: str
    logs: list[PartitionLog] = field(default_factory=list)
    configs: dict[str, str] = field(default_factory=dict)
    sent_without_key: int = 0

    @property
    def max_message_bytes(self) -> int:
        return int(self.configs.get("max.message.bytes", 1_048_588))  # Kafka's default

    def grow(self, total: int) -> None:
        for number in range(len(self.logs), total):
            self.logs.append(PartitionLog(TopicPartition(self.name, number)))

    def choose(self, key: bytes | None) -> int:
        """The key's partition; without a key one after the other, where Kafka's clients choose any."""
        if key is not None:
            return partition_of(key, len(self.logs))
        self.sent_without_key += 1
        return (self.sent_without_key - 1) % len(self.logs)


class MemoryCluster:
    """What every `MemoryBus` of a test talks to. Belongs to one event loop; nothing here is safe between threads.

    It behaves as Kafka does where MegaFlow can notice: see `tests/contract`, which runs on both. It does not model
    time: no session, transaction or retention runs out by itself. `inject` makes such things happen, at exact places.
    """

    def __init__(self, topics: Mapping[str, int] | None = None, *, clock: Clock | None = None) -> None:
        """topics: those that are there from the start, with their numbers of partitions."""
        self.clock = clock or SystemClock()
        self.changed = Signal()
        self.inject = Inject(self)
        self._topics: dict[str, MemoryTopic] = {}
        self._groups: dict[str, Group] = {}
        self._epochs: dict[str, int] = {}
        self._transactions: dict[str, Transaction] = {}
        self._decided: dict[str, tuple[Transaction, Literal["committed", "aborted"]]] = {}
        for name, partitions in (topics or {}).items():
            self.create(name, partitions)

    def bus(self) -> MemoryBus:
        """A new client of this cluster."""
        from megaflow_stream.testing.bus import MemoryBus

        return MemoryBus(self)

    # What a test does without a client.

    def create(self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> bool:
        """Creates a topic; False where it was there already."""
        if name in self._topics:
            return False
        self._topics[name] = MemoryTopic(name=name, configs=dict(configs or {}))
        self.grow(name, partitions)
        return True

    def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> int:
        """Writes one record outside any transaction; its offset."""
        found = self.topic(topic)
        number = found.choose(key) if partition is None else partition
        record = self.record(TopicPartition(topic, number), value, key, headers)
        return self.append(record, None)

    def records(self, topic: str, *, isolation: Isolation = "read_committed") -> list[MemoryRecord]:
        """Everything that a reader could read of a topic now, partition by partition."""
        return [record for log in self.topic(topic).logs for record in log.read(log.begin, isolation, None, 1 << 62)[0]]

    def truncate(self, partition: TopicPartition, offset: int) -> None:
        """Forgets the records before `offset`, as retention does."""
        self.log(partition).truncate(offset)
        self.changed.announce()

    def committed(self, group: str) -> dict[TopicPartition, int]:
        """Every committed next offset of a group."""
        return dict(self._groups[group].offsets) if group in self._groups else {}

    # What the clients are made of.

    async def call(self, doing: str) -> None:
        """Every request of a client begins with this: others have their turn, and an injected fault is raised."""
        await asyncio.sleep(0)
        if self.inject.unreachable_calls > 0:
            self.inject.unreachable_calls -= 1
            raise ServiceUnreachable(f"{doing}: no broker answers (injected)")

    @property
    def topics(self) -> Mapping[str, MemoryTopic]:
        return self._topics

    @property
    def groups(self) -> Mapping[str, Group]:
        return self._groups

    def topic(self, name: str) -> MemoryTopic:
        """Raises `NotFound`."""
        if name not in self._topics:
            raise NotFound("no such topic", hint="create it on the cluster first", topic=name)
        return self._topics[name]

    def log(self, partition: TopicPartition) -> PartitionLog:
        """Raises `NotFound`."""
        logs = self.topic(partition.topic).logs
        if not 0 <= partition.partition < len(logs):
            raise NotFound("no such partition", **partition._asdict())
        return logs[partition.partition]

    def group(self, name: str) -> Group:
        return self._groups.setdefault(name, Group(self, name))

    def grow(self, name: str, total: int) -> None:
        """More partitions; the groups that read the topic share them out anew."""
        self.topic(name).grow(total)
        self._reassign(name)

    def delete(self, name: str) -> None:
        del self._topics[self.topic(name).name]
        for group in self._groups.values():
            group.offsets = {p: offset for p, offset in group.offsets.items() if p.topic != name}
        self._reassign(name)

    def _reassign(self, topic: str) -> None:
        for group in self._groups.values():
            if any(topic in member.topics for member in group.members):
                group.rebalance()

    def record(
        self, partition: TopicPartition, value: bytes | None, key: bytes | None, headers: Headers
    ) -> MemoryRecord:
        """A record that is not yet in a log."""
        return MemoryRecord(*partition, -1, int(self.clock.now() * 1000), key, value, tuple(headers or ()))

    def append(self, record: MemoryRecord, transaction: Transaction | None) -> int:
        offset = self.log(TopicPartition(record.topic, record.partition)).append(record, transaction)
        self.changed.announce()
        return offset

    def init_producer(self, transactional_id: str) -> int:
        """InitProducerId (KIP-98): a new epoch fences the older producers; what they decided is carried out, and what
        they left open is aborted, before this returns."""
        self.write_markers(transactional_id)
        self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
        if (transaction := self._transactions.get(transactional_id)) is not None:
            self.end(transaction, "aborted")
            self.write_markers(transactional_id)
        return self._epochs[transactional_id]

    def join(self, transaction: Transaction, doing: str) -> None:
        """A transaction writes: it is the open one of its id from now on. Raises `Fenced` where its producer is not
        the newest."""
        epoch = self._epochs[transaction.transactional_id]
        if transaction.epoch != epoch:
            raise Fenced(
                f"{doing}: a newer producer has the transactional id",
                hint="throw this producer away",
                transactional_id=transaction.transactional_id,
                epoch=f"{transaction.epoch}, now {epoch}",
            )
        self.write_markers(transaction.transactional_id)  # a producer's next transaction waits for them
        self._transactions[transaction.transactional_id] = transaction

    def end(self, transaction: Transaction, state: Literal["committed", "aborted"]) -> None:
        """Decides a transaction."""
        del self._transactions[transaction.transactional_id]
        self._decided[transaction.transactional_id] = transaction, state
        if not self.inject.holds_markers(transaction.transactional_id):
            self.write_markers(transaction.transactional_id)

    def write_markers(self, transactional_id: str) -> None:
        """Carries out what was decided, all at once: markers to the partitions, offsets to their groups."""
        if transactional_id not in self._decided:
            return
        transaction, state = self._decided.pop(transactional_id)
        transaction.state = state
        for log in transaction.logs:
            log.mark(transaction)
        if state == "committed":
            for group, offsets in transaction.offsets.items():
                self.group(group).offsets.update(offsets)
        self.changed.announce()

    def logs_of(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, PartitionLog]:
        """Raises `NotFound`."""
        return {TopicPartition(*partition): self.log(TopicPartition(*partition)) for partition in partitions}
