"""Reading from Kafka by aiokafka: partitions by name (`KafkaReader`), or as a member of a group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import IllegalStateError, NoOffsetForPartitionError, OffsetOutOfRangeError

from megaflow_stream.bus.api import Assignment, Record, TopicPartition
from megaflow_stream.bus.ending import end
from megaflow_stream.bus.failure import FAILURES, calm, translate
from megaflow_stream.errors import BusError, RecordsExpired

log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
_GRACE_SECONDS = 0.5
# Where a new partition of a group stands until its owner seeks: beyond every log, so that forgetting it is an error.
_UNSOUGHT = 1 << 62


class KafkaReader:
    """An aiokafka consumer that reads what it is told. See `bus.api.Reader`.

    auto_offset_reset is "none": a position that retention has overtaken is an error, never a silent jump, and no
    reset of the client's own can overtake a `seek` (aiokafka 0.14: one in flight since `assign` answers a later one).
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._consumer = AIOKafkaConsumer(**options, enable_auto_commit=False, auto_offset_reset="none")
        calm(self._consumer._client)

    async def start(self) -> None:
        try:
            await self._consumer.start()
        except BaseException as error:
            await self.close()
            if isinstance(error, FAILURES):
                raise translate(error, "starting a reader") from error
            raise

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._consumer.assign([KafkaPartition(*partition) for partition in positions])
        for partition, offset in positions.items():
            self._consumer.seek(KafkaPartition(*partition), offset)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        with _assigned("seeking", partition):
            self._consumer.seek(KafkaPartition(*partition), offset)

    def pause(self, *partitions: TopicPartition) -> None:
        for partition in partitions:
            with _assigned("pausing", partition):
                self._consumer.pause(KafkaPartition(*partition))

    def resume(self, *partitions: TopicPartition) -> None:
        for partition in partitions:
            with _assigned("resuming", partition):
                self._consumer.resume(KafkaPartition(*partition))

    async def fetch(
        self, *, timeout_seconds: float = 0.2, max_records: int | None = None
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        try:
            # getmany() keeps to its timeout but for a rebalance, whose end it waits for.
            async with asyncio.timeout(timeout_seconds + _GRACE_SECONDS):
                found: Mapping[TopicPartition, Sequence[Record]] = await self._consumer.getmany(
                    timeout_ms=int(timeout_seconds * 1000), max_records=max_records
                )
            return found
        except TimeoutError:
            return {}
        except NoOffsetForPartitionError:  # assigned by the group, not yet sought by its owner
            await asyncio.sleep(min(timeout_seconds, 0.02))  # raised at once, and so again: others must have their turn
            return {}
        except OffsetOutOfRangeError as error:
            raise await self._expired(error) from error
        except FAILURES as error:
            raise translate(error, "fetching") from error

    async def _expired(self, error: OffsetOutOfRangeError) -> RecordsExpired | BusError:
        positions = error.args[0] if error.args and isinstance(error.args[0], dict) else {}
        for partition, offset in positions.items():
            if offset == _UNSOUGHT:
                return BusError("fetching: resumed before it was sought", **partition._asdict())
            try:
                begin = (await self._consumer.beginning_offsets([partition]))[partition]
                end = (await self._consumer.end_offsets([partition]))[partition]
            except FAILURES as failure:
                raise translate(failure, "asking what is retained", **partition._asdict()) from failure
            return RecordsExpired(
                f"the position {offset} is outside of what is retained: [{begin}, {end})",
                hint="records between the two are gone: raise the retention, or move the position on purpose",
                topic=partition.topic,
                partition=partition.partition,
                offset=offset,
            )
        return RecordsExpired(f"a position is out of the retained range: {error}")

    async def position(self, partition: TopicPartition) -> int:
        with _assigned("asking for the position of", partition):
            position: int = await self._consumer.position(KafkaPartition(*partition))
        if position == _UNSOUGHT:
            raise BusError("asking for a position before it was sought", **partition._asdict())
        return position

    async def close(self) -> None:
        await end(self._consumer.stop(), _CLOSE_SECONDS, "a reader")


@contextlib.contextmanager
def _assigned(doing: str, partition: TopicPartition) -> Iterator[None]:
    try:
        yield
    except IllegalStateError as error:
        raise BusError(f"{doing} a partition that is not assigned to this reader", **partition._asdict()) from error


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """aiokafka swallows what these raise, and sends no heartbeat while on_partitions_assigned runs."""

    def __init__(self, consumer: AIOKafkaConsumer, assignment: Assignment) -> None:
        self.consumer, self.assignment = consumer, assignment

    async def on_partitions_revoked(self, revoked: Sequence[KafkaPartition]) -> None:
        try:
            await self.assignment.on_revoked(sorted(TopicPartition(*partition) for partition in revoked))
        except Exception:
            log.exception("giving up partitions")

    async def on_partitions_assigned(self, assigned: Sequence[KafkaPartition]) -> None:
        try:
            self.consumer.pause(*assigned)
            for partition in assigned:
                # aiokafka 0.14 fetches nothing from a broker while a partition of it has no position, paused or not.
                self.consumer.seek(partition, _UNSOUGHT)
            await self.assignment.on_assigned(sorted(TopicPartition(*partition) for partition in assigned))
        except Exception:
            log.exception("taking partitions")


class KafkaGroupReader(KafkaReader):
    """A member of a consumer group. See `bus.api.GroupReader`."""

    def __init__(self, options: Mapping[str, Any], topics: Sequence[str], assignment: Assignment) -> None:
        super().__init__(options)
        self._topics, self._assignment = topics, assignment

    async def start(self) -> None:
        await super().start()
        self._consumer.subscribe(list(self._topics), listener=_Listener(self._consumer, self._assignment))

    async def committed(self, partition: TopicPartition) -> int | None:
        try:
            offset: int | None = await self._consumer.committed(KafkaPartition(*partition))
            return offset
        except FAILURES as error:
            raise translate(error, "reading the committed offset", **partition._asdict()) from error
