"""The two buses that the contract tests run on: in memory, and real Kafka."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from megaflow_stream.bus import Bus, connect
from megaflow_stream.testing import MemoryCluster
from tests.contract.place import Place


@pytest.fixture(params=["memory", "kafka"])
def address(request: pytest.FixtureRequest) -> str | None:
    """Bootstrap servers, or None for the bus in memory."""
    return request.getfixturevalue("kafka") if request.param == "kafka" else None


@pytest.fixture
async def place(address: str | None) -> AsyncIterator[Place]:
    cluster = MemoryCluster()

    async def client() -> Bus:
        return cluster.bus() if address is None else await connect(address)

    place = Place(await client(), client)
    yield place
    await place.close()
