"""The log of plans: one topic, one partition, written by the job's own transactional id.

1. InitProducerId: an older leader is fenced, its open transaction has ended.
2. Only then the log is read, to its end: it cannot grow behind our back.
3. New entries are appended in one transaction, and trained only after its commit.

The same transaction moves the job's consumer group, which nobody joins, to the ends of what is planned: the plan cursor
for lag displays and backpressure. The checkpoint's offsets alone say where training goes on.

A committed entry is never rewritten. A leader that finds an entry it did not write has been overtaken: `Fenced`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

from megaflow_stream.bus.api import Bus, Producer, TopicPartition, json_headers
from megaflow_stream.errors import Damaged, Fenced, MegaflowError, RecordsExpired
from megaflow_stream.observe.scan import scan
from megaflow_stream.training.plan import PlanEntry

# As long as a broker may be away within a transaction: one that it timed out is told like a fence. The next leader's
# InitProducerId ends it at once, so nobody waits for this.
TRANSACTION_SECONDS = 300.0
_HEADERS = json_headers("megaflow.plan/1")


def group(job: str) -> str:
    """The consumer group that holds a job's plan cursor."""
    return f"megaflow.train.{job}"


class Logged(NamedTuple):
    """An entry and its offset in the log."""

    offset: int
    entry: PlanEntry


async def read_plan(bus: Bus, topic: str, begin: int | None = None) -> list[Logged]:
    """The committed entries from offset `begin` (default: the log's first) to the log's end now."""
    log = TopicPartition(topic, 0)
    first = (await bus.begin_offsets([log]))[log]
    if begin is not None and begin < first:
        raise RecordsExpired(
            f"the plan is needed from offset {begin}, but its topic begins at {first}",
            hint="the plan's topic must keep everything: retention_seconds: -1",
            topic=topic,
        )
    found: list[Logged] = []
    async for record in scan(bus, topic, begin={log: first if begin is None else begin}):
        try:
            found.append(Logged(record.offset, PlanEntry.from_json(record.value or b"")))
        except Damaged as error:
            raise Damaged(error.message, topic=topic, partition=0, offset=record.offset) from error
    for before, after in pairwise(found):
        if after.entry.step != before.entry.step + 1:
            raise Damaged(
                f"the plan goes from step {before.entry.step} to step {after.entry.step}",
                topic=topic,
                offset=after.offset,
            )
    return found


class PlanLog:
    """The leader's writing end. `fence`, then `read`; after an error that can be retried `append` does both."""

    def __init__(self, bus: Bus, topic: str, job: str) -> None:
        self.bus, self.topic = bus, topic
        self.group = self.transactional_id = group(job)
        self._producer: Producer | None = None
        self._end = 0  # offset after the last entry that this leader knows

    async def fence(self) -> None:
        """No older leader can write from now on."""
        self._producer = await self.bus.producer(self.transactional_id, transaction_timeout_seconds=TRANSACTION_SECONDS)

    async def read(self, begin: int | None) -> list[Logged]:
        """After `fence`: the log from `begin` to its end."""
        found = await read_plan(self.bus, self.topic, begin)
        self._end = found[-1].offset + 1 if found else (begin or 0)
        return found

    async def append(
        self, entries: Sequence[PlanEntry], cursor: Mapping[TopicPartition, int] | None = None
    ) -> list[Logged]:
        """Commits the entries, all or none, and moves the group past them. Raises `Fenced` when another leader has the
        log.

        cursor: moves the group to these offsets as well: nothing that can be planned lies below them.

        Raises an error with `retriable` when nobody knows whether they were committed: call it again with the same."""
        if self._producer is None:
            await self.fence()
            found = await self.read(self._end)
            if found and [logged.entry for logged in found] == list(entries):
                return found
            if found:
                raise Fenced("the plan's log has entries of another leader", topic=self.topic, offset=found[0].offset)
        assert self._producer is not None
        ends = {**(cursor or {}), **{r.partition: r.end for e in entries for r in e.ranges}}
        if not ends:
            return []
        try:
            await self._producer.begin()
            sent = [await self._producer.send(self.topic, e.to_json(), partition=0, headers=_HEADERS) for e in entries]
            await self._producer.send_offsets(self.group, ends)
            await self._producer.commit(cast("list[asyncio.Future[object]]", sent))
            logged = [Logged(future.result(), e) for future, e in zip(sent, entries, strict=True)]
        except MegaflowError:
            await self.close()
            raise
        if logged:
            self._end = logged[-1].offset + 1
        return logged

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.close()
