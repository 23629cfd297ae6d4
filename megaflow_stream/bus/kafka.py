"""The bus on a real Kafka cluster, by aiokafka 0.14."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import stamina
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ConsumerStoppedError,
    InvalidPartitionsError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)

from megaflow_stream.bus.api import Assignment, Isolation, TopicDescription, TopicPartition
from megaflow_stream.bus.ending import end
from megaflow_stream.bus.failure import FAILURES, calm, translate
from megaflow_stream.bus.kafka_producer import KafkaProducer
from megaflow_stream.bus.kafka_reader import KafkaGroupReader, KafkaReader
from megaflow_stream.bus.security import Security
from megaflow_stream.errors import NotFound

T = TypeVar("T")
_ASK_SECONDS = 20.0
_CLOSE_SECONDS = 5.0
_KNOWN_SECONDS = 10.0
_UNKNOWN_SECONDS = 0.5  # a topic just made is not known at once; one that is still unknown then is not there
_TOPIC_CONFIG = 1  # the source DYNAMIC_TOPIC_CONFIG of DescribeConfigs


class KafkaBus:
    """See `bus.api.Bus`. Holds one admin client and one asking consumer a isolation level, made when first needed and
    thrown away after a failure."""

    def __init__(self, bootstrap_servers: str, security: Security, client_id: str) -> None:
        self.bootstrap_servers, self.security = bootstrap_servers, security
        self._options: dict[str, Any] = {
            "bootstrap_servers": bootstrap_servers,
            "client_id": client_id,
            **security.client_options(),
        }
        self._admin: AIOKafkaAdminClient | None = None
        self._askers: dict[Isolation, AIOKafkaConsumer] = {}
        self._lock = asyncio.Lock()

    async def check(self) -> None:
        await self._ask("connecting to Kafka at " + self.bootstrap_servers, self._admin_client, seconds=10)

    async def producer(
        self,
        transactional_id: str | None = None,
        *,
        transaction_timeout_seconds: float = 20.0,
        batch_bytes: int = 1 << 17,
        linger_seconds: float = 0.0,
    ) -> KafkaProducer:
        producer = KafkaProducer(
            self._options, transactional_id, transaction_timeout_seconds, batch_bytes, linger_seconds
        )
        await producer.start()
        return producer

    async def reader(
        self, *, isolation: Isolation = "read_committed", partition_fetch_bytes: int = 1 << 20
    ) -> KafkaReader:
        reader = KafkaReader(
            {
                **self._options,
                "isolation_level": isolation,
                "max_partition_fetch_bytes": partition_fetch_bytes,
            }
        )
        await reader.start()
        return reader

    async def group_reader(
        self,
        group: str,
        topics: Sequence[str],
        assignment: Assignment,
        *,
        session_seconds: float = 10.0,
        heartbeat_seconds: float = 3.0,
        partition_fetch_bytes: int = 1 << 20,
    ) -> KafkaGroupReader:
        reader = KafkaGroupReader(
            {
                **self._options,
                "group_id": group,
                "isolation_level": "read_committed",
                "session_timeout_ms": int(session_seconds * 1000),
                "heartbeat_interval_ms": int(heartbeat_seconds * 1000),
                "max_partition_fetch_bytes": partition_fetch_bytes,
                # Liveness is the engine's own: a long batch must not cost the membership.
                "max_poll_interval_ms": 24 * 3600 * 1000,
                "rebalance_timeout_ms": 30_000,
            },
            topics,
            assignment,
        )
        await reader.start()
        return reader

    async def partitions(self, topic: str) -> list[TopicPartition]:
        async def ask() -> list[TopicPartition]:
            (found,) = await (await self._admin_client()).describe_topics([topic])
            if found["error_code"]:
                raise for_code(found["error_code"])(topic)
            return sorted(TopicPartition(topic, p["partition"]) for p in found["partitions"])

        return await self._ask("asking for partitions", ask, topic=topic)

    async def begin_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        async def ask() -> dict[TopicPartition, int]:
            asker = await self._asker("read_committed")
            found = await asker.beginning_offsets([KafkaPartition(*p) for p in partitions])
            return {TopicPartition(*p): offset for p, offset in found.items()}

        return await self._ask("asking for begin offsets", ask) if partitions else {}

    async def end_offsets(
        self, partitions: Sequence[TopicPartition], *, isolation: Isolation = "read_committed"
    ) -> dict[TopicPartition, int]:
        async def ask() -> dict[TopicPartition, int]:
            asker = await self._asker(isolation)
            found = await asker.end_offsets([KafkaPartition(*p) for p in partitions])
            return {TopicPartition(*p): offset for p, offset in found.items()}

        return await self._ask("asking for end offsets", ask) if partitions else {}

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        async def ask() -> dict[TopicPartition, int]:
            found = await (await self._admin_client()).list_consumer_group_offsets(group)
            return {TopicPartition(*p): o.offset for p, o in found.items() if o.offset >= 0}

        return await self._ask(f"asking for the offsets of {group}", ask)

    async def topics(self) -> dict[str, TopicDescription]:
        async def ask() -> dict[str, TopicDescription]:
            admin = await self._admin_client()
            found = [t for t in await admin.describe_topics() if not t["is_internal"] and not t["error_code"]]
            found = [t for t in found if not t["topic"].startswith("__")]
            names = [t["topic"] for t in found]
            configs: dict[str, dict[str, str]] = {name: {} for name in names}
            for answer in await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, n) for n in names]):
                for _, _, _, name, entries in answer.resources:
                    configs[name] = {e[0]: e[1] for e in entries if e[3] == _TOPIC_CONFIG}
            return {t["topic"]: TopicDescription(t["topic"], len(t["partitions"]), configs[t["topic"]]) for t in found}

        return await self._ask("listing topics", ask)

    async def create_topic(self, topic: TopicDescription, *, replication_factor: int = 1) -> bool:
        async def ask() -> bool:
            new = NewTopic(topic.name, topic.partitions, replication_factor, topic_configs=dict(topic.configs))
            answer = await (await self._admin_client()).create_topics([new])
            for _, code, *message in answer.topic_errors:
                if code == TopicAlreadyExistsError.errno:
                    return False
                if code:
                    raise for_code(code)(*message)
            return True

        made = await self._ask("creating a topic", ask, topic=topic.name)
        # The controller answers before the broker knows the topic.
        deadline = time.monotonic() + _KNOWN_SECONDS
        while made and time.monotonic() < deadline:
            with contextlib.suppress(NotFound):
                await self.partitions(topic.name)  # asks for a while
                break
        return made

    async def alter_topic(self, name: str, configs: Mapping[str, str]) -> None:
        async def ask() -> None:
            resource = ConfigResource(ConfigResourceType.TOPIC, name, configs=dict(configs))
            for answer in await (await self._admin_client()).alter_configs([resource]):
                for code, message, *_ in answer.resources:
                    if code:
                        raise for_code(code)(message)

        await self._ask("changing a topic", ask, topic=name)

    async def add_partitions(self, name: str, total: int) -> None:
        async def ask() -> None:
            try:
                await (await self._admin_client()).create_partitions({name: NewPartitions(total)})
            except InvalidPartitionsError:  # as many are there already, which is well, or more
                if len(await self.partitions(name)) != total:
                    raise

        await self._ask("adding partitions", ask, topic=name)

    async def delete_topic(self, name: str) -> None:
        async def ask() -> None:
            answer = await (await self._admin_client()).delete_topics([name])
            for _, code in answer.topic_error_codes:
                if code:
                    raise for_code(code)(name)

        await self._ask("deleting a topic", ask, topic=name)

    async def close(self) -> None:
        admin, self._admin = self._admin, None
        askers, self._askers = self._askers, {}
        if admin is not None:
            await end(admin.close(), _CLOSE_SECONDS, "an admin client")
        for asker in askers.values():
            await end(asker.stop(), _CLOSE_SECONDS, "an asking client")

    async def _ask(
        self, doing: str, ask: Callable[[], Awaitable[T]], *, seconds: float = _ASK_SECONDS, **where: object
    ) -> T:
        unknown_until = time.monotonic() + _UNKNOWN_SECONDS

        def again(error: Exception) -> bool:
            if isinstance(error, UnknownTopicOrPartitionError) and time.monotonic() > unknown_until:
                return False
            # Another question failed, and closed the client that this one was using: the next try has a new one.
            return isinstance(error, ConsumerStoppedError) or bool(getattr(error, "retriable", False))

        try:
            async with asyncio.timeout(seconds):
                async for attempt in stamina.retry_context(
                    on=again,
                    attempts=None,
                    timeout=seconds,
                    wait_initial=0.05,
                    wait_max=1.0,
                    wait_jitter=0.05,
                ):
                    with attempt:
                        return await ask()
        except FAILURES as error:
            await self.close()
            raise translate(error, doing, **where) from error
        raise AssertionError("retry_context ends by returning or raising")

    async def _admin_client(self) -> AIOKafkaAdminClient:
        async with self._lock:
            if self._admin is None:
                admin = AIOKafkaAdminClient(**self._options)
                calm(admin._client)
                try:
                    await admin.start()
                except BaseException:
                    await admin.close()
                    raise
                self._admin = admin
            return self._admin

    async def _asker(self, isolation: Isolation) -> AIOKafkaConsumer:
        async with self._lock:
            if isolation not in self._askers:
                asker = AIOKafkaConsumer(**self._options, enable_auto_commit=False, isolation_level=isolation)
                calm(asker._client)
                try:
                    await asker.start()
                except BaseException:
                    await asker.stop()
                    raise
                self._askers[isolation] = asker
            return self._askers[isolation]
