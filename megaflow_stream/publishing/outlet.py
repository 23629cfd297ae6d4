"""The transactional producer of a publish, made anew after a failure that may pass.

While no broker answers aiokafka waits for ever; here a batch is given up after `AWAY_SECONDS`, and said to be waiting
before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import stamina

from megaflow_stream.bus.api import Bus, OutRecord, Producer, TopicPartition, json_headers
from megaflow_stream.errors import Fenced, MegaflowError, ServiceUnreachable
from megaflow_stream.publishing import ledger as ledgers
from megaflow_stream.publishing.ledger import Entry, Ledger
from megaflow_stream.publishing.record import Prepared
from megaflow_stream.publishing.spread import partitions_of

T = TypeVar("T")
AWAY_SECONDS = 60.0  # an embedded broker that died is up again within 10
SAID_SECONDS = 5.0
ABORT_SECONDS = 2.0
TRANSACTION_SECONDS = 25.0  # the broker aborts one after 20: this producer cannot commit it any more

log = logging.getLogger(__name__)
_HEADERS = json_headers("megaflow.ledger/1")


@dataclass(slots=True)
class Batch:
    """What one transaction writes: records, and the ledger's entries (key, entry, its JSON) of their chunks."""

    records: list[Prepared] = field(default_factory=list)
    entries: list[tuple[bytes, Entry, bytes]] = field(default_factory=list)
    size_bytes: int = 0


class Outlet:
    """Writes batches, each in one transaction, to `topic` and the ledger."""

    def __init__(self, bus: Bus, topic: str, dataset: str, transactional_id: str) -> None:
        self.bus, self.topic, self.dataset, self.transactional_id = bus, topic, dataset, transactional_id
        self._partitions: list[TopicPartition] = []
        self._producer: Producer | None = None

    async def open(self) -> Ledger:
        """The ledger, read after the id is initialised: an older run's transaction has ended, and that run is fenced.

        In the other order its last transaction could be committed after the reading, and be published again."""
        return await self._trying(self._open)

    async def _open(self) -> Ledger:
        await self.close()
        self._partitions = await self.bus.partitions(self.topic)
        self._producer = await self.bus.producer(self.transactional_id)
        return await ledgers.read(self.bus, self.topic, self.dataset)

    async def write(self, batch: Batch) -> None:
        """Commits a batch. Where a failure leaves open whether it was, the ledger tells before it is tried again.

        Raises `ServiceUnreachable` when it is not committed within `AWAY_SECONDS`, `Fenced`.
        """

        async def once() -> None:
            if self._producer is None:
                written = (await self._open()).written
                if all(written.get(key) == value for key, _, value in batch.entries):
                    return
            try:
                async with asyncio.timeout(TRANSACTION_SECONDS):
                    await self._transaction(batch)
            except TimeoutError as error:
                await self._give_up()
                raise ServiceUnreachable("a transaction did not end", topic=self.topic) from error
            except BaseException:
                await self._give_up()
                raise

        said = asyncio.get_running_loop().call_later(
            SAID_SECONDS,
            log.warning,
            "Kafka takes long to answer: waiting for it, for %g s at most",
            AWAY_SECONDS,
        )
        try:
            async with asyncio.timeout(AWAY_SECONDS):
                await self._trying(once)
        except TimeoutError as error:
            raise ServiceUnreachable(
                f"publishing stopped: Kafka did not answer for {AWAY_SECONDS:g} s",
                hint="`megaflow services status`; when Kafka is back, publish again: it goes on where this one stopped",
                topic=self.topic,
            ) from error
        except Fenced as error:
            raise Fenced(
                f"publishing stopped: {error.message}",
                hint="the same publish was started elsewhere, or the broker was away for longer than a transaction "
                "may take: publish again, it goes on where this one stopped",
                **error.where,
            ) from error
        finally:
            said.cancel()

    async def _transaction(self, batch: Batch) -> None:
        producer = self._producer
        assert producer is not None
        count = len(self._partitions)
        split: list[list[OutRecord]] = [[] for _ in range(count)]
        chosen = partitions_of([record.key for record in batch.records], count)
        for number, (key, value, headers, _) in zip(chosen, batch.records, strict=True):
            split[number].append(OutRecord(value, key, headers))
        sent: list[asyncio.Future[object]] = []
        await producer.begin()
        for (topic, partition), records in zip(self._partitions, split, strict=True):
            if records:
                sent += await producer.send_many(topic, partition, records)
        entries = [OutRecord(value, key, _HEADERS) for key, _, value in batch.entries]
        sent += await producer.send_many(ledgers.TOPIC, 0, entries)
        await producer.commit(sent)

    async def _trying(self, call: Callable[[], Awaitable[T]]) -> T:
        async for attempt in stamina.retry_context(
            on=lambda error: bool(getattr(error, "retriable", False)),
            attempts=None,
            timeout=AWAY_SECONDS,
            wait_initial=0.1,
            wait_max=2.0,
        ):
            with attempt:
                return await call()
        raise AssertionError("retry_context ends by returning or raising")

    async def _give_up(self) -> None:
        """Ends the transaction where that can be done: an open one would hold readers up until the broker aborts it."""
        if self._producer is not None:
            with contextlib.suppress(MegaflowError, TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await self._producer.abort()
        await self.close()

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.close()
