"""A place to publish to, once on the bus in memory and once on a real broker."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from megaflow_stream.bus import TopicDescription, connect
from megaflow_stream.publishing import ledger
from megaflow_stream.testing import MemoryCluster
from tests.integration.publish_case import Place


@pytest.fixture(params=["memory", "kafka"])
def address(request: pytest.FixtureRequest) -> str | None:
    """Bootstrap servers, or None for the bus in memory."""
    return request.getfixturevalue("kafka") if request.param == "kafka" else None


@pytest.fixture
async def place(address: str | None) -> AsyncIterator[Place]:
    topic = f"raw-{os.urandom(4).hex()}"
    if address is None:
        cluster = MemoryCluster({topic: 4, ledger.TOPIC: 1})
        yield Place(bus=cluster.bus(), topic=topic, cluster=cluster)
        return
    bus = await connect(address)
    await bus.create_topic(TopicDescription(topic, 4))
    await bus.create_topic(TopicDescription(ledger.TOPIC, 1, {"cleanup.policy": "compact"}))
    yield Place(bus=bus, topic=topic)
    await bus.delete_topic(topic)
    await bus.close()
