"""aiokafka's errors as ours, and calm while no broker answers."""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka import errors as kafka

from megaflow_stream.errors import (
    BusError,
    Fenced,
    MegaflowError,
    NotFound,
    RecordsExpired,
    ServiceUnreachable,
)

_FENCED = (
    kafka.ProducerFenced,
    kafka.InvalidProducerEpoch,
    kafka.OutOfOrderSequenceNumber,
    kafka.IllegalOperation,
)
_UNREACHABLE = (
    kafka.KafkaConnectionError,
    kafka.NodeNotReadyError,
    kafka.RequestTimedOutError,
    kafka.KafkaTimeoutError,
    asyncio.TimeoutError,
    ConnectionError,
)
# IllegalOperation and ConsumerStoppedError are no KafkaErrors in aiokafka.
FAILURES = (
    kafka.KafkaError,
    kafka.IllegalOperation,
    kafka.ConsumerStoppedError,
    asyncio.TimeoutError,
    ConnectionError,
    OSError,
)


def translate(error: BaseException, doing: str, **where: Any) -> MegaflowError:
    """The error of ours that says what `error` means, and where.

    A fence has many names in aiokafka: `ProducerFenced` from any call, `IllegalOperation` from a send when the sender
    task has died of it, and a transaction that the broker timed out looks the same."""
    if isinstance(error, MegaflowError):
        return error
    name, said = type(error).__name__, str(error)
    text = f"{doing}: {said if name in said else f'{name}: {said}'.rstrip(': ')}"  # aiokafka's own say their name
    if isinstance(error, _FENCED) or "Invalid state transition" in text:  # an assertion of the transaction manager's
        return Fenced(text, **where)
    if isinstance(error, kafka.OffsetOutOfRangeError):
        return RecordsExpired(text, **where)
    if isinstance(error, kafka.UnknownTopicOrPartitionError):
        return NotFound(
            f"{doing}: there is no such topic", hint="`megaflow topics apply` creates the project's topics", **where
        )
    if isinstance(error, _UNREACHABLE):
        return ServiceUnreachable(
            text, hint="is the broker up? `megaflow services status`, or --bootstrap-servers", **where
        )
    if isinstance(error, (kafka.MessageSizeTooLargeError, kafka.RecordTooLargeError)):
        return BusError(text, hint="raise `max_message` in the topic's YAML, then `megaflow topics apply`", **where)
    return BusError(text, retriable=bool(getattr(error, "retriable", False)), **where)


def calm(client: Any, longest_seconds: float = 2.0) -> None:
    """Makes a client wait between metadata requests that fail.

    aiokafka 0.14 goes round at once when nobody answers: 12 producers wrote 37,000 log lines in a minute and took the
    CPU that the broker needed to come back. `client` is an AIOKafkaClient."""
    ask, wait = client._metadata_update, 0.05

    async def update(cluster: Any, topics: Any) -> bool:
        nonlocal wait
        if await ask(cluster, topics):
            wait = 0.05
            return True
        await asyncio.sleep(wait)
        wait = min(wait * 2, longest_seconds)
        return False

    client._metadata_update = update
