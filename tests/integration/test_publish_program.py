"""`megaflow_stream.Publisher`: conversations of a program."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import megaflow_stream
from megaflow_stream import Publisher
from megaflow_stream.bus import Bus, Producer, TopicDescription, connect
from megaflow_stream.conversations import synthetic
from megaflow_stream.errors import BadRecord, BusError, NotFound, ServiceUnreachable, UsageError
from megaflow_stream.testing import MemoryCluster
from tests.integration.publish_case import read_all


@pytest.fixture
async def topic(kafka: str) -> AsyncIterator[str]:
    name = f"raw-{os.urandom(4).hex()}"
    bus = await connect(kafka)
    await bus.create_topic(TopicDescription(name, 4))
    yield name
    await bus.delete_topic(name)
    await bus.close()


async def test_each_conversation_is_published_as_it_is(kafka: str, topic: str) -> None:
    async with Publisher(bootstrap_servers=kafka, topic=topic, dataset="agent", producer="my-app") as publisher:
        for conversation in synthetic.documents(300):
            assert await publisher.publish(conversation) == conversation["id"]
    assert publisher.published == 300
    bus = await connect(kafka)
    records = await read_all(bus, topic)
    await bus.close()
    expected = {orjson.dumps(document) for document in synthetic.documents(300)}
    assert {record.value for record in records} == expected
    assert len(records) == 300
    assert {dict(record.headers)["producer"] for record in records} == {b"my-app"}
    assert {dict(record.headers)["schema"] for record in records} == {b"megaflow.raw/1"}


async def test_one_wrong_conversation_does_not_harm_the_others() -> None:
    cluster = MemoryCluster({"raw": 2})
    good = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    wrong: list[Any] = [
        {"messages": [{"role": "robot"}]},
        {"hello": "world"},
        b"{",
        "[]",
        {"messages": [], "x": object()},
        {"messages": [{"role": "user", "content": "x" * (1 << 20)}]},
    ]
    async with Publisher(bus=cluster.bus(), topic="raw") as publisher:
        for conversation in wrong:
            with pytest.raises(BadRecord):
                await publisher.publish(conversation)
        await publisher.publish(good)
        await publisher.publish(good.decode())
        await publisher.flush()
        assert publisher.published == 2
    assert [record.value for record in await read_all(cluster.bus(), "raw")] == [good, good]


class Slow:
    """A bus whose producer acknowledges what it is told to, and no more."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.waiting: list[asyncio.Future[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def producer(self) -> Producer:
        producer = await self._bus.producer()

        async def send(*args: object, **options: object) -> asyncio.Future[int]:
            self.waiting.append(asyncio.get_running_loop().create_future())
            return self.waiting[-1]

        producer.send = send  # type: ignore[method-assign]
        return producer


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_it_waits_while_its_byte_budget_is_used_up() -> None:
    bus: Any = Slow(MemoryCluster({"raw": 1}).bus())
    conversation = {"messages": [{"role": "user", "content": "x" * 1000}]}
    size = len(orjson.dumps(conversation))
    async with Publisher(bus=bus, topic="raw", budget_bytes=3 * size) as publisher:
        tasks = [asyncio.create_task(publisher.publish(conversation)) for _ in range(8)]
        await turns()
        assert len(bus.waiting) == 3
        bus.waiting[0].set_result(0)
        await turns()
        assert len(bus.waiting) == 4
        large = asyncio.create_task(
            publisher.publish({"messages": [{"role": "user", "content": "y" * 9000}]})
        )  # larger than the budget: alone
        while not large.done() or not all(task.done() for task in tasks):
            for future in bus.waiting:
                if not future.done():
                    future.set_result(0)
            await turns()
        for future in bus.waiting:
            if not future.done():
                future.set_result(0)
    assert publisher.published == 9


async def test_what_could_not_be_delivered_is_raised() -> None:
    bus: Any = Slow(MemoryCluster({"raw": 1}).bus())
    conversation = {"messages": [{"role": "user", "content": "Hi"}]}
    publisher = Publisher(bus=bus, topic="raw")
    await publisher.__aenter__()
    await publisher.publish(conversation)
    bus.waiting[0].set_exception(BusError("lost"))
    await turns()
    with pytest.raises(BusError, match="lost"):
        await publisher.publish(conversation)
    with pytest.raises(BusError, match="lost"):
        await publisher.__aexit__(None, None, None)


async def test_flush_waits_no_longer_than_it_is_told_and_goes_on_later() -> None:
    bus: Any = Slow(MemoryCluster({"raw": 1}).bus())
    conversation = {"messages": [{"role": "user", "content": "Hi"}]}
    size = len(orjson.dumps(conversation))
    async with Publisher(bus=bus, topic="raw", budget_bytes=2 * size, timeout_seconds=0.05) as publisher:
        for _ in range(2):
            await publisher.publish(conversation)
        for wait in (publisher.flush(), publisher.flush(0.01), publisher.publish(conversation)):
            with pytest.raises(ServiceUnreachable, match="2 conversations are sent and not acknowledged") as caught:
                await wait
        assert "call flush() again" in caught.value.hint
        for future in bus.waiting:
            future.set_result(0)
        await publisher.flush()
        assert (publisher.published, len(bus.waiting)) == (2, 2)
    with pytest.raises(UsageError, match="timeout"):
        Publisher(bus=bus, timeout_seconds=0)


async def test_what_is_never_acknowledged_is_said_at_the_end_and_after_an_error_not_waited_for_again() -> None:
    bus: Any = Slow(MemoryCluster({"raw": 1}).bus())
    conversation = {"messages": [{"role": "user", "content": "Hi"}]}

    async def program(timeout_seconds: float, flush_seconds: float | None) -> None:
        async with Publisher(bus=bus, topic="raw", timeout_seconds=timeout_seconds) as publisher:
            await publisher.publish(conversation)
            if flush_seconds:
                await publisher.flush(flush_seconds)

    with pytest.raises(ServiceUnreachable, match="1 conversations"):
        await program(0.01, None)
    with pytest.raises(ServiceUnreachable, match=r"for 0\.02 s"):  # and not for a day
        await program(86400, 0.02)


async def test_an_error_of_the_program_is_not_hidden() -> None:
    bus: Any = Slow(MemoryCluster({"raw": 1}).bus())

    async def program() -> None:
        async with Publisher(bus=bus, topic="raw") as publisher:
            await publisher.publish({"messages": []})
            bus.waiting[0].set_exception(BusError("lost"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await program()


async def test_wrong_use(kafka: str) -> None:
    for options in ({}, {"bootstrap_servers": kafka, "budget_bytes": 0}):
        with pytest.raises(UsageError):
            Publisher(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not open"):
        await Publisher(bootstrap_servers=kafka).publish({"messages": []})
    with pytest.raises(NotFound):
        async with Publisher(bootstrap_servers=kafka, topic=f"none-{os.urandom(4).hex()}"):
            pass
    with pytest.raises(ServiceUnreachable):
        async with Publisher(bootstrap_servers="127.0.0.1:9"):
            pass


def test_importing_the_package_alone_is_cheap() -> None:
    heavy = ("aiokafka", "orjson", "pyarrow", "torch")
    code = f"import sys, megaflow_stream; print([m for m in {heavy} if m in sys.modules])"
    root = Path(megaflow_stream.__file__).parent.parent
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True).strip() == "[]"
    with pytest.raises(AttributeError):
        _ = megaflow_stream.nothing
