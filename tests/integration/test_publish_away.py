"""Publishing while the broker is away: a bounded wait that is said, nothing lost. On a broker of its own, frozen."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from megaflow_stream import Publisher
from megaflow_stream.bus import TopicDescription, connect
from megaflow_stream.errors import ServiceUnreachable
from megaflow_stream.publishing import chunk, ledger, outlet
from megaflow_stream.publishing import run as runs
from megaflow_stream.publishing.report import Report
from megaflow_stream.runtime import services
from megaflow_stream.runtime.services import Endpoints
from tests.integration.publish_case import Place, made, write

pytestmark = pytest.mark.xdist_group("embedded services")


@pytest.fixture
async def found(tmp_path: Path) -> AsyncIterator[Endpoints]:
    folder = tmp_path / ".megaflow"
    try:
        yield await services.up(folder, s3=False, authenticate=False)
    finally:
        await services.down(folder)


@pytest.mark.timeout(300)
async def test_a_frozen_broker_is_waited_for_within_a_bound(
    found: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await connect(found.bootstrap_servers)
    await bus.create_topic(TopicDescription("raw", 2))
    await bus.create_topic(TopicDescription("program", 2))
    await bus.create_topic(TopicDescription(ledger.TOPIC, 1, {"cleanup.policy": "compact"}))
    place, program = Place(bus=bus, topic="raw"), Place(bus=bus, topic="program")
    documents = made(600)
    path = write(tmp_path / "a", documents)
    monkeypatch.setattr(chunk, "DOCUMENTS", 50)
    monkeypatch.setattr(runs, "TRANSACTION_BYTES", 1 << 17)
    monkeypatch.setattr(outlet, "AWAY_SECONDS", 4.0)
    monkeypatch.setattr(outlet, "SAID_SECONDS", 1.0)

    def freeze(report: Report) -> None:
        """After the first transaction."""
        if report.published:
            os.kill(found.pids["kafka"], signal.SIGSTOP)

    async with Publisher(found.bootstrap_servers, topic="program", timeout_seconds=60) as publisher:
        await publisher.publish(documents[0])
        await publisher.flush()
        try:
            with caplog.at_level(logging.WARNING), pytest.raises(ServiceUnreachable, match="for 4 s") as stopped:
                await place.publish(path, progress=freeze)
            await publisher.publish(documents[1])
            with pytest.raises(ServiceUnreachable, match="1 conversations are sent and not acknowledged"):
                await publisher.flush(1.0)
        finally:
            os.kill(found.pids["kafka"], signal.SIGCONT)
        assert stopped.value.exit_code == 3
        assert "publish again: it goes on where this one stopped" in stopped.value.hint
        assert "Kafka takes long to answer: waiting for it, for 4 s at most" in caplog.text
        await publisher.flush()
        assert publisher.published == 2
    assert await program.values() == Counter(map(orjson.dumps, documents[:2]))

    monkeypatch.setattr(outlet, "AWAY_SECONDS", 60.0)
    report = await place.publish(path)
    assert report.published + report.already_published == 600
    assert await place.values() == Counter(map(orjson.dumps, documents))
    await bus.close()


async def test_a_transaction_that_hangs_is_given_up_and_made_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a broker that was away for longer than it keeps a transaction open."""
    documents = made(40)
    path = write(tmp_path / "a", documents)
    begun = outlet.Outlet._transaction
    hung: list[outlet.Batch] = []

    async def transaction(self: outlet.Outlet, batch: outlet.Batch) -> None:
        await begun(self, batch)
        if not hung:
            hung.append(batch)
            monkeypatch.setattr(outlet, "TRANSACTION_SECONDS", 20.0)
            await asyncio.Event().wait()  # its answer never comes; it is committed all the same

    monkeypatch.setattr(outlet, "TRANSACTION_SECONDS", 5.0)
    monkeypatch.setattr(outlet.Outlet, "_transaction", transaction)
    assert (await place.publish(path)).published == 40
    assert hung
    assert await place.values() == Counter(map(orjson.dumps, documents))
