"""Publishing from a Python program.

async with Publisher(bootstrap_servers="127.0.0.1:9092", producer="my-app") as publisher:
    await publisher.publish({"messages": [{"role": "user", "content": "Hello"}, ...]})
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import orjson

from megaflow_stream.bus.api import Bus, Producer
from megaflow_stream.bus.connect import connect
from megaflow_stream.bus.security import Security
from megaflow_stream.conversations.detect import AUTO
from megaflow_stream.conversations.jsontext import decode
from megaflow_stream.errors import BadRecord, MegaflowError, ServiceUnreachable, UsageError
from megaflow_stream.publishing.publish import TOPIC, max_message_bytes
from megaflow_stream.publishing.record import Recorder

BUDGET_BYTES = 16 << 20
# Shorter than aiokafka's own 40 s, after which it takes a broker that is away for a topic that is not there.
AWAY_SECONDS = 30.0


class Publisher:
    """Sends conversations to a topic, each checked first; idempotent, acknowledged by all replicas.

    bootstrap_servers: Kafka's addresses. security: its credentials, where it asks for any.
    bus: in place of both, for instance `megaflow_stream.testing`'s in memory; it stays open.
    format: a dialect, or auto: told by each document's content.
    budget_bytes: what may be under way, sent and not yet acknowledged; `publish` waits while it is used up.
    timeout_seconds: how long `publish`, `flush` and the end of the `async with` wait for a broker from which nothing
        comes, before `ServiceUnreachable`. What is under way stays so: a later call goes on waiting for it.

    What is published twice is sent twice: the processor's de-duplication removes the second.
    """

    def __init__(
        self,
        bootstrap_servers: str = "",
        *,
        topic: str = TOPIC,
        dataset: str = "agent",
        producer: str = "megaflow",
        format: str = AUTO,
        budget_bytes: int = BUDGET_BYTES,
        timeout_seconds: float = AWAY_SECONDS,
        security: Security | None = None,
        bus: Bus | None = None,
    ) -> None:
        if not bootstrap_servers and bus is None:
            raise UsageError("a Publisher needs bootstrap_servers", hint='for instance "127.0.0.1:9092"')
        if budget_bytes <= 0:
            raise UsageError(f"the byte budget is {budget_bytes}: it must be above 0")
        if timeout_seconds <= 0:
            raise UsageError(f"the timeout is {timeout_seconds} s: it must be above 0")
        self._servers, self._security = bootstrap_servers, security
        self._topic, self._dataset, self._name, self._format = topic, dataset, producer, format
        self._budget_bytes, self._timeout_seconds = budget_bytes, timeout_seconds
        self._bus, self._own_bus = bus, bus is None
        self._recorder: Recorder | None = None
        self._producer: Producer | None = None
        self._under_way_bytes = 0
        self._under_way: set[asyncio.Future[int]] = set()
        self._room = asyncio.Event()
        self._failure: MegaflowError | None = None
        self.published = 0

    async def __aenter__(self) -> Publisher:
        """Raises `ServiceUnreachable` where no broker answers, `NotFound` where the topic is not there."""
        if self._bus is None:
            self._bus = await connect(self._servers, security=self._security)
        try:
            self._recorder = Recorder(
                dataset=self._dataset,
                producer=self._name,
                format=self._format,
                max_message_bytes=await max_message_bytes(self._bus, self._topic),
            )
            self._producer = await self._bus.producer()
        except BaseException:
            await self._close_bus()
            raise
        return self

    async def publish(self, conversation: Mapping[str, Any] | bytes | str) -> str:
        """Sends one conversation, a document of a known dialect or its JSON text; returns its id.

        It is acknowledged when `flush` or the `async with` has ended. Raises `BadRecord` where this conversation
        cannot be read or is too large (nothing is sent, the next one may be fine), `ServiceUnreachable` where no
        broker answers (this one is not sent), and the bus's error where an earlier one could not be delivered.
        """
        if self._recorder is None or self._producer is None:
            raise UsageError("the Publisher is not open", hint="async with Publisher(...) as publisher: ...")
        raw, document = _document(conversation)
        record = self._recorder.prepare(raw, document)
        size = len(record.value)
        while self._failure is None and self._under_way_bytes + size > max(self._budget_bytes, size):
            await self._progress(self._timeout_seconds)
        self._raise()
        self._under_way_bytes += size
        try:
            async with asyncio.timeout(self._timeout_seconds):
                sent = await self._producer.send(self._topic, record.value, key=record.key, headers=record.headers)
        except TimeoutError as error:
            self._done(size, None)
            raise self._away(self._timeout_seconds) from error
        except BaseException as error:
            self._done(size, error if isinstance(error, MegaflowError) else None)
            raise
        self._under_way.add(sent)
        sent.add_done_callback(lambda future: self._acknowledged(future, size))
        return record.key.decode()

    async def flush(self, timeout_seconds: float | None = None) -> None:
        """Waits until everything is acknowledged.

        Raises the bus's error where something could not be delivered, and `ServiceUnreachable` where nothing has been
        acknowledged for `timeout_seconds` (default: the Publisher's): nothing is lost then, call it again.
        """
        while self._under_way:
            await self._progress(self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        self._raise()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flushes and closes; what is not acknowledged then is given up.

        After an error of the caller's own that one is raised, not a failed delivery; after `ServiceUnreachable` the
        broker is not waited for once more."""
        try:
            if not isinstance(error, (asyncio.CancelledError, ServiceUnreachable)):
                await self.flush()
        except MegaflowError:
            if error is None:
                raise
        finally:
            producer, self._producer = self._producer, None
            if producer is not None:
                await producer.close()
            await self._close_bus()

    async def _progress(self, seconds: float) -> None:
        """Until something more is acknowledged, or has failed."""
        self._room.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._room.wait()
        except TimeoutError as error:
            raise self._away(seconds) from error

    def _away(self, seconds: float) -> ServiceUnreachable:
        return ServiceUnreachable(
            f"{len(self._under_way)} conversations are sent and not acknowledged: no broker answered for {seconds:g} s",
            hint="call flush() again when Kafka is back: nothing is lost while the Publisher is open; what is not "
            "acknowledged when it is closed, publish again: what did arrive is removed by de-duplication",
            topic=self._topic,
        )

    def _acknowledged(self, sent: asyncio.Future[int], size: int) -> None:
        self._under_way.discard(sent)
        failure = None if sent.cancelled() else sent.exception()
        if failure is None:
            self.published += not sent.cancelled()
            self._done(size, None)
        elif isinstance(failure, MegaflowError):
            self._done(size, failure)
        else:
            self._done(size, MegaflowError(f"a conversation was not delivered: {failure!r}", topic=self._topic))

    def _done(self, size: int, failure: MegaflowError | None) -> None:
        self._under_way_bytes -= size
        self._failure = self._failure or failure
        self._room.set()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _close_bus(self) -> None:
        if self._own_bus and self._bus is not None:
            bus, self._bus = self._bus, None
            await bus.close()


def _document(conversation: Mapping[str, Any] | bytes | str) -> tuple[bytes, Mapping[str, Any]]:
    """Its JSON text and what it says. A text is sent as it is, an object encoded once."""
    if isinstance(conversation, (bytes, str)):
        raw = conversation.encode() if isinstance(conversation, str) else conversation
        return raw, decode(raw)
    try:
        return orjson.dumps(conversation), conversation
    except orjson.JSONEncodeError as error:
        raise BadRecord(f"the conversation cannot be written as JSON: {error}") from error
