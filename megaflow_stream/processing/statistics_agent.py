"""What the statistics agent does with a batch of records: adds it to the totals, and serves them, exactly once.

The order, for each batch:

    1. own: InitProducerId of the agent's one transactional id, which fences any earlier owner and ends its
       transaction; then the served totals are read to their end. Once after each assignment and after each error.
    2. add each range to the totals of its key, unless they have had it.   Died here: nothing was written.
    3. set the table, flush its changelog.            Died here: the ranges come again, and are repetitions.
    4. write the totals to `dataset.statistics`, in one transaction.   Died here: the same; the served ones hold.
    5. the caller acknowledges the batch.             Died before: the ranges come again, and are repetitions.

A repetition writes the totals of its key again, so what died between 3 and 4 is served in the end. A thawed owner can
still write old totals to the table's changelog, which nobody fences; it cannot write them to the served topic, and a
table's totals are merged with the served ones (the further of each source holds) before they are used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from megaflow_stream.bus.api import Bus, Headers, OutRecord, Producer, json_headers
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.errors import BadRecord, Fenced, MegaflowError
from megaflow_stream.observe.scan import scan
from megaflow_stream.observe.status import StatusWriter
from megaflow_stream.processing.statistics import Counted, Outcome, Totals

log = logging.getLogger(__name__)

_HEADERS = json_headers("megaflow.dataset-statistics/1")
TRIES = 6  # of one batch while the broker fails, with pauses of 0.2 s, doubled: 6 s in all


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticsTopics:
    """The names that the agent uses. The app's name is also its consumer group and its transactional id."""

    app: str = "megaflow.statistics"
    source: str = "processing.statistics"
    served: str = "dataset.statistics"
    dead_letters: str = "dlq"
    status: str = "status"
    events: str = "status.events"


class Arrived(NamedTuple):
    """A record of the source topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class StatisticsAgent:
    """Adds records to totals by key.

    table: where totals are kept, as documents by key.
    flush: returns when every change of the table has been acknowledged.
    """

    def __init__(
        self,
        bus: Bus,
        topics: StatisticsTopics,
        table: MutableMapping[str, dict[str, Any]],
        flush: Callable[[], Awaitable[object]],
        status: StatusWriter,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.bus, self.topics, self.table, self.flush, self.status = bus, topics, table, flush, status
        self.clock = clock or SystemClock()
        self._owner: Producer | None = None
        self._own_again = False
        self._served: dict[str, Totals] = {}
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._bad = 0

    def assigned(self) -> None:
        """Another agent may have owned the partition meanwhile: own again before the next batch."""
        self._own_again = True

    async def take(self, records: Sequence[Arrived]) -> None:
        """Adds and serves a batch. Raises `Fenced` when another agent has taken over, and what trying did not help;
        then nothing of the batch may be acknowledged."""
        for attempt in range(TRIES):
            try:
                await self._take(records)
                return
            except Fenced:
                raise
            except MegaflowError as error:
                await self.close()
                if not error.retriable or attempt == TRIES - 1:
                    raise
                log.warning("statistics are tried again: %s", error)
                await self.clock.sleep(0.2 * 2**attempt)

    async def close(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.close()

    async def _take(self, records: Sequence[Arrived]) -> None:
        owner = await self._own()
        changed: dict[str, Totals] = {}
        letters: list[tuple[Arrived, BadRecord]] = []
        outcomes = dict.fromkeys(Outcome, 0)
        for record in records:
            try:
                counted = Counted.decode(record.value)
            except BadRecord as error:
                letters.append((record, error))
                continue
            key = counted.key
            totals = changed[key] if key in changed else self._totals(key, counted)
            changed[key], outcome = totals.add(counted)
            outcomes[outcome] += 1
            if outcome is Outcome.OVERLAPPING:
                log.error("not added, for part of it was: [%d, %d) of %s", counted.begin, counted.end, counted.source)
        documents = {key: totals.document() for key, totals in changed.items()}
        for key, document in documents.items():
            self.table[key] = document
        await self.flush()
        await owner.begin()
        sent: list[asyncio.Future[Any]] = []
        for key, document in documents.items():
            sent.append(
                await owner.send(self.topics.served, orjson.dumps(document), key=key.encode(), headers=_HEADERS)
            )
        sent += [await self._send_letter(owner, record, error) for record, error in letters]
        await owner.commit(sent)
        self._served.update(changed)
        self._bad += len(letters)
        for outcome, count in outcomes.items():
            self._outcomes[outcome] += count
        await self.status.update(
            "running",
            records_in=sum(self._outcomes.values()) + self._bad,
            keys=len(self._served),
            dead_letters=self._bad,
            **{f"ranges_{outcome.value}": count for outcome, count in self._outcomes.items()},
        )

    async def _own(self) -> Producer:
        if self._owner is None or self._own_again:
            self._own_again = False
            await self.close()
            owner = await self.bus.producer(self.topics.app)
            served: dict[str, Totals] = {}
            try:
                async for record in scan(self.bus, self.topics.served):
                    if record.key is not None and record.value is not None:
                        served[record.key.decode()] = Totals.of_document(orjson.loads(record.value))
            except BaseException:
                await owner.close()
                raise
            self._owner, self._served = owner, served
        return self._owner

    def _totals(self, key: str, counted: Counted) -> Totals:
        totals = self._served.get(key) or Totals(dataset=counted.dataset, producer=counted.producer)
        kept = self.table.get(key)
        return totals if kept is None else totals.merge(Totals.of_document(kept))

    async def _send_letter(self, owner: Producer, record: Arrived, error: BadRecord) -> asyncio.Future[object]:
        origin: Mapping[str, object] = {
            "origin-topic": self.topics.source,
            "origin-partition": record.partition,
            "origin-offset": record.offset,
            "processor": "statistics",
            "error": error,
            "attempt": 1,
        }
        headers = [*record.headers, *((name, str(value).encode()) for name, value in origin.items())]
        letter = OutRecord(record.value, record.key, headers)  # `send` refuses one without key and value
        return (await owner.send_many(self.topics.dead_letters, 0, [letter]))[0]
