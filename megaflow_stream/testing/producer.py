"""Writing to a cluster in memory, with or without transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megaflow_stream.bus.api import Headers, OutRecord, TopicPartition
from megaflow_stream.errors import BusError, Fenced, MegaflowError
from megaflow_stream.testing.log import MemoryRecord, Transaction

if TYPE_CHECKING:
    from megaflow_stream.testing.cluster import MemoryCluster


class MemoryProducer:
    """See `bus.api.Producer`. A record is in the log when `send` returns; its future is done, or holds the error.

    The end of a transaction that wrote nothing asks nobody, as with aiokafka: a fence shows at the first write.
    """

    def __init__(self, cluster: MemoryCluster, transactional_id: str | None, epoch: int) -> None:
        self._cluster, self.transactional_id, self.epoch = cluster, transactional_id, epoch
        self._transaction: Transaction | None = None
        self._closed = False

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[int]:
        await self._request("sending a record", needs_transaction=self.transactional_id is not None)
        number = self._cluster.topic(topic).choose(key) if partition is None else partition
        return self._append(TopicPartition(topic, number), value, key, headers)

    async def send_many(self, topic: str, partition: int, records: Sequence[OutRecord]) -> list[asyncio.Future[object]]:
        await self._request("sending records", needs_transaction=self.transactional_id is not None)
        place = TopicPartition(topic, partition)
        return [self._append(place, value, key, headers) for value, key, headers in records]

    async def begin(self) -> None:
        await asyncio.sleep(0)
        if self.transactional_id is None or self._transaction is not None:
            raise Fenced("beginning a transaction: one is open, or this producer has no transactional id")
        self._transaction = Transaction(self.transactional_id, self.epoch)

    async def send_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        doing = f"committing offsets of {group} in a transaction"
        transaction = await self._request(doing, needs_transaction=True)
        assert transaction is not None
        named = {TopicPartition(*partition): offset for partition, offset in offsets.items()}
        self._cluster.logs_of(list(named))
        self._cluster.join(transaction, doing)
        transaction.offsets.setdefault(group, {}).update(named)

    async def commit(self, sent: Iterable[asyncio.Future[object]]) -> None:
        await asyncio.gather(*sent)
        doing = f"committing a transaction of {self.transactional_id}"
        transaction = await self._request(doing, needs_transaction=True)
        assert transaction is not None
        if not transaction.empty:
            self._cluster.join(transaction, doing)
            if self._cluster.inject.takes_abort(transaction.transactional_id):
                self._cluster.init_producer(transaction.transactional_id)
                self._cluster.join(transaction, doing)
            self._cluster.end(transaction, "committed")
        self._transaction = None

    async def abort(self) -> None:
        doing = f"aborting a transaction of {self.transactional_id}"
        transaction = await self._request(doing, needs_transaction=True)
        assert transaction is not None
        if not transaction.empty:
            self._cluster.join(transaction, doing)
            self._cluster.end(transaction, "aborted")
        self._transaction = None

    async def flush(self) -> None:
        await self._request("flushing", needs_transaction=False)

    async def close(self) -> None:
        """An open transaction stays open, as with a producer that died, until its id is taken anew."""
        await asyncio.sleep(0)
        self._closed = True

    async def _request(self, doing: str, *, needs_transaction: bool) -> Transaction | None:
        await self._cluster.call(doing)
        if self._closed:
            raise BusError(f"{doing}: this producer is closed")
        if needs_transaction and self._transaction is None:
            raise Fenced(f"{doing}: no transaction is open", transactional_id=self.transactional_id)
        return self._transaction

    def _append(
        self, place: TopicPartition, value: bytes | None, key: bytes | None, headers: Headers
    ) -> asyncio.Future[Any]:
        """The future of a record that the broker took or refused at once."""
        self._cluster.log(place)
        record = self._cluster.record(place, value, key, headers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._fits(record)
            if self._transaction is not None:
                self._cluster.join(self._transaction, "a record was not acknowledged")
            future.set_result(self._cluster.append(record, self._transaction))
        except MegaflowError as error:
            future.set_exception(error)
            future.exception()  # seen: no complaint when a producer that is thrown away leaves it behind
        return future

    def _fits(self, record: MemoryRecord) -> None:
        limit = self._cluster.topic(record.topic).max_message_bytes
        if record.size_bytes > limit:
            raise BusError(
                f"a record was not acknowledged: its {record.size_bytes} bytes are more than the {limit} of the topic",
                hint="raise `max_message` in the topic's YAML, then `megaflow topics apply`",
                topic=record.topic,
            )
