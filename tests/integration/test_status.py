"""Status on a real broker: the latest of each component, ages, drift, and bounded size."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import orjson
import pytest

from megaflow_stream.bus import Bus, TopicDescription
from megaflow_stream.observe.status import StatusWriter, read_status


@pytest.fixture
async def topics(bus: Bus) -> AsyncIterator[tuple[str, str]]:
    suffix = uuid.uuid4().hex[:8]
    names = f"status-{suffix}", f"status-{suffix}.events"
    await bus.create_topic(TopicDescription(names[0], 1, {"cleanup.policy": "compact"}))
    await bus.create_topic(TopicDescription(names[1], 1))
    yield names
    for name in names:
        await bus.delete_topic(name)


async def test_components_are_read_back_with_their_latest_state(bus: Bus, topics: tuple[str, str]) -> None:
    async with (
        StatusWriter(bus, "trainer/a/0", "trainer", *topics) as one,
        StatusWriter(bus, "worker/b/0", "worker", *topics) as two,
    ):
        await one.update("running", step=3)
        await two.update("idle")
        await two.close()
        await one.close("failed", error="loss is NaN")
    found = await read_status(bus, topic=topics[0])
    assert list(found) == ["trainer/a/0", "worker/b/0"]
    assert (found["trainer/a/0"]["state"], found["trainer/a/0"]["step"]) == ("failed", 3)
    assert found["worker/b/0"]["state"] == "stopped"
    assert not any(document["stale"] for document in found.values())


async def test_ages_are_clamped_drift_is_said_and_the_dead_are_stale(bus: Bus, topics: tuple[str, str]) -> None:
    class Fixed:
        def now(self) -> float:
            return 10_000.0

        def monotonic(self) -> float:
            return 0.0

        async def sleep(self, seconds: float) -> None: ...

    producer = await bus.producer()
    for component, state, at in [
        ("ahead", "running", 10_060),
        ("dead", "running", 9_000),
        ("ended", "stopped", 9_000),
    ]:
        value = orjson.dumps({"component": component, "state": state, "at_ms": at * 1000})
        await (await producer.send(topics[0], value, key=component.encode()))
    await (await producer.send(topics[0], b"not JSON", key=b"odd"))
    await (await producer.send(topics[0], b'{"state": "running"}', key=b"gone"))
    await (await producer.send(topics[0], None, key=b"gone"))
    await producer.close()
    found = await read_status(bus, topic=topics[0], clock=Fixed())
    assert (found["ahead"]["age_seconds"], found["ahead"]["clock_ahead_seconds"]) == (0.0, 60.0)
    assert [c for c in found if found[c]["stale"]] == ["dead"]
    assert "gone" not in found
    assert found["ended"]["age_seconds"] == 1000


async def test_no_topic_is_no_status(bus: Bus) -> None:
    assert await read_status(bus, topic="status-that-is-not-there") == {}
