"""A writer of status: what it writes and when, with a broker that is slow, gone or back."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from megaflow_stream.errors import ServiceUnreachable
from megaflow_stream.observe.status import REPEAT_SECONDS, StatusWriter


class ByHand:
    """A clock whose time goes on only by `pass_by`."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.seconds + seconds, future))
        await future

    async def pass_by(self, seconds: float) -> None:
        self.seconds += seconds
        for until, future in self.sleepers:
            if until <= self.seconds and not future.done():
                future.set_result(None)
        self.sleepers = [pair for pair in self.sleepers if not pair[1].done()]
        await settle()


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


class Wire:
    """A bus that keeps what producers send; `down` makes it unreachable."""

    def __init__(self) -> None:
        self.down = False
        self.producers = 0
        self.written: list[tuple[str, bytes | None, dict[str, Any]]] = []

    async def producer(self, transactional_id: str | None = None, **options: object) -> Wire:
        if self.down:
            raise ServiceUnreachable("no broker answers")
        self.producers += 1
        return self

    async def send(
        self, topic: str, value: bytes, *, key: bytes | None = None, **options: object
    ) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.down:
            future.set_exception(ServiceUnreachable("no broker answers"))
        else:
            self.written.append((topic, key, orjson.loads(value)))
            future.set_result(len(self.written))
        return future

    async def close(self) -> None: ...

    def states(self, topic: str) -> list[str]:
        return [document["state"] for name, _, document in self.written if name == topic]

    def numbers(self, topic: str, name: str) -> list[Any]:
        return [document.get(name) for to, _, document in self.written if to == topic]


def writer(wire: Wire, clock: ByHand) -> StatusWriter:
    return StatusWriter(wire, "worker/clean/0", "worker", clock=clock)  # type: ignore[arg-type]


async def test_a_change_goes_out_at_once_and_numbers_once_a_second() -> None:
    wire, clock = Wire(), ByHand()
    async with writer(wire, clock) as status:
        await settle()
        await status.update("running", records_in=0)
        await settle()
        for records in range(1, 1000):
            await status.update("running", records_in=records)
        await settle()
        assert wire.numbers("status", "records_in") == [None, 0]
        await clock.pass_by(1.0)
        assert wire.numbers("status", "records_in") == [None, 0, 999]
        await status.update("idle")
        await settle()
        assert wire.states("status") == ["starting", "running", "running", "idle"]
    assert wire.states("status")[-1] == "stopped"
    assert wire.states("status") == wire.states("status.events")
    assert wire.numbers("status", "records_in")[-1] == 999
    topic, key, document = wire.written[-1]
    assert (topic, key, document["component"], document["kind"]) == (
        "status",
        b"worker/clean/0",
        "worker/clean/0",
        "worker",
    )
    assert document["at_ms"] == int(clock.now() * 1000)


async def test_an_idle_component_is_heard_again_and_again_on_the_compacted_topic_only() -> None:
    wire, clock = Wire(), ByHand()
    async with writer(wire, clock) as status:
        await status.update("idle")
        await settle()
        events = len(wire.states("status.events"))
        for _ in range(5):
            await clock.pass_by(REPEAT_SECONDS)
        assert len(wire.states("status.events")) == events
        assert wire.numbers("status", "at_ms")[-1] == int(clock.now() * 1000)


async def test_without_a_broker_the_caller_goes_on_and_the_changes_are_written_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wire, clock = Wire(), ByHand()
    wire.down = True
    async with writer(wire, clock) as status:
        await settle()
        for step in range(500):
            await status.update("running" if step % 2 else "waiting", step=step)
            await clock.pass_by(0.1)
        assert wire.written == []
        assert len(status._changes) <= 100
        assert sum("trying on" in record.message for record in caplog.records) == 1
        wire.down = False
        await clock.pass_by(2 * REPEAT_SECONDS)
        assert wire.numbers("status", "step")[-1] == 499
        assert wire.numbers("status.events", "step")[-3:] == [497, 498, 499]
        assert wire.numbers("status", "changes_lost")[-1] > 0
        assert sum("written again" in record.message for record in caplog.records) == 1


async def test_the_last_status_of_a_component_that_raises_is_failed_with_the_error() -> None:
    wire = Wire()
    with pytest.raises(RuntimeError):
        async with writer(wire, ByHand()):
            raise RuntimeError("the disk is full")
    assert wire.states("status")[-1] == "failed"
    assert wire.numbers("status", "error")[-1] == "RuntimeError: the disk is full"


async def test_closing_ends_without_a_broker() -> None:
    wire = Wire()
    wire.down = True
    async with writer(wire, ByHand()) as status:
        await status.update("running")
    assert wire.written == []


async def test_an_unknown_state_or_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="running"):
        await writer(Wire(), ByHand()).update("runing")
    with pytest.raises(ValueError, match="evaluator"):
        StatusWriter(Wire(), "x", "robot")  # type: ignore[arg-type]
