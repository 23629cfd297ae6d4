"""Writing to Kafka by aiokafka: idempotent, acks=all, with or without transactions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition

from megaflow_stream.bus.api import Headers, OutRecord, TopicPartition
from megaflow_stream.bus.ending import end
from megaflow_stream.bus.failure import FAILURES, calm, translate
from megaflow_stream.errors import BusError

log = logging.getLogger(__name__)

# One request may hold the largest message of any topic of the project (8 MiB) several times over.
_REQUEST_BYTES = 1 << 25
_CLOSE_SECONDS = 5.0
# Calls in the wrong state, after a fence above all, fail assertions.
_REFUSED = (*FAILURES, AssertionError)


class KafkaProducer:
    """A started aiokafka producer. See `bus.api.Producer`."""

    def __init__(
        self,
        options: Mapping[str, Any],
        transactional_id: str | None,
        transaction_timeout_seconds: float,
        batch_bytes: int,
        linger_seconds: float,
    ) -> None:
        transactional = (
            {
                "transactional_id": transactional_id,
                "transaction_timeout_ms": int(transaction_timeout_seconds * 1000),
                # A first produce after a commit is refused now and then (NOT_ENOUGH_REPLICAS): try again soon.
                "retry_backoff_ms": 20,
            }
            if transactional_id
            else {"enable_idempotence": True}
        )
        self.transactional_id = transactional_id
        self._batch_bytes = batch_bytes
        self._producer = AIOKafkaProducer(
            **options,
            acks="all",
            max_request_size=_REQUEST_BYTES,
            max_batch_size=batch_bytes,
            linger_ms=int(linger_seconds * 1000),
            **transactional,
        )
        calm(self._producer.client)

    async def start(self) -> None:
        try:
            await self._producer.start()
        except BaseException as error:
            await self.close()
            if isinstance(error, FAILURES):
                raise translate(error, f"starting the producer {self.transactional_id or ''}".rstrip()) from error
            raise

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[int]:
        self._opened("sending a record")
        try:
            sent = await self._producer.send(topic, value, key=key, partition=partition, headers=headers)
        except _REFUSED as error:
            raise translate(error, "sending a record", topic=topic, partition=partition) from error
        return _acknowledged(sent, topic)

    async def send_many(self, topic: str, partition: int, records: Sequence[OutRecord]) -> list[asyncio.Future[object]]:
        futures: list[asyncio.Future[object]] = []
        producer = self._producer
        self._opened("sending records")
        try:
            await producer.client._wait_on_metadata(topic)
            batch = producer.create_batch()
            for value, key, headers in records:
                if batch.append(key=key, value=value, timestamp=None, headers=headers or []) is None:
                    futures.append(_acknowledged(await producer.send_batch(batch, topic, partition=partition), topic))
                    batch = producer.create_batch()
                    if batch.append(key=key, value=value, timestamp=None, headers=headers or []) is None:
                        batch = producer.create_batch()
                        alone = await producer.send(topic, value, key=key, partition=partition, headers=headers or None)
                        futures.append(_acknowledged(alone, topic))
            if batch.record_count():
                futures.append(_acknowledged(await producer.send_batch(batch, topic, partition=partition), topic))
        except _REFUSED as error:
            raise translate(error, "sending records", topic=topic, partition=partition) from error
        return futures

    def _opened(self, doing: str) -> None:
        """aiokafka waits for ever when a closed producer is asked to send."""
        if self._producer._closed:
            raise BusError(f"{doing}: this producer is closed", transactional_id=self.transactional_id)

    async def begin(self) -> None:
        try:
            await self._producer.begin_transaction()
        except _REFUSED as error:
            raise translate(error, f"beginning a transaction of {self.transactional_id}") from error

    async def send_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        try:
            await self._producer.send_offsets_to_transaction(
                {KafkaPartition(*partition): offset for partition, offset in offsets.items()}, group
            )
        except _REFUSED as error:
            raise translate(error, f"committing offsets of {group} in a transaction") from error

    async def commit(self, sent: Iterable[asyncio.Future[object]]) -> None:
        try:
            # commit_transaction() waits for the batches and ignores what failed: a lost record would be committed.
            await asyncio.gather(*sent)
            await self._producer.commit_transaction()
        except _REFUSED as error:
            raise translate(error, f"committing a transaction of {self.transactional_id}") from error

    async def abort(self) -> None:
        try:
            await self._producer.abort_transaction()
        except _REFUSED as error:
            raise translate(error, f"aborting a transaction of {self.transactional_id}") from error

    async def flush(self) -> None:
        try:
            await self._producer.flush()
        except FAILURES as error:
            raise translate(error, "flushing") from error

    async def close(self) -> None:
        """stop() waits for the sender, which may be retrying for ever: bounded here."""
        if await end(self._producer.stop(), _CLOSE_SECONDS, f"the producer {self.transactional_id or ''}".rstrip()):
            return
        self._producer._closed = True
        if (sender := self._producer._sender.sender_task) is not None:
            sender.cancel()
            await asyncio.wait([sender], timeout=1.0)
        await end(self._producer.client.close(), _CLOSE_SECONDS, "its client")


async def _offset(sent: asyncio.Future[Any], topic: str) -> int:
    try:
        offset: int = (await sent).offset
        return offset
    except FAILURES as error:
        raise translate(error, "a record was not acknowledged", topic=topic) from error


def _seen(future: asyncio.Future[Any]) -> None:
    """A producer that is thrown away leaves failed sends that nobody awaits: no complaint at exit."""
    if not future.cancelled():
        future.exception()


def _acknowledged(sent: asyncio.Future[Any], topic: str) -> asyncio.Future[Any]:
    """The offset once acknowledged, or an error of ours."""
    future = asyncio.ensure_future(_offset(sent, topic))
    future.add_done_callback(_seen)
    return future
