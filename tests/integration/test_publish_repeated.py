"""A publish that is repeated, interrupted or overtaken has the effect of once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from megaflow_stream.bus import Bus, Producer, TopicPartition
from megaflow_stream.errors import Fenced, ServiceUnreachable
from megaflow_stream.publishing import chunk, ledger, outlet
from megaflow_stream.publishing import run as runs
from megaflow_stream.publishing.publish import publish, transactional_id
from megaflow_stream.publishing.report import Report
from megaflow_stream.testing import MemoryCluster
from tests.integration.publish_case import Place, lines, made, read_all, write


async def test_a_second_publish_publishes_nothing(place: Place, tmp_path: Path) -> None:
    documents = made(2500)
    path = write(tmp_path / "a.jsonl", documents)
    first = await place.publish(path)
    assert (first.published, first.already_published) == (2500, 0)
    moved = path.rename(tmp_path / "elsewhere")
    second = await place.publish(moved)
    assert (second.published, second.already_published) == (0, 2500), "content counts, not the name"
    assert await place.values() == Counter(map(orjson.dumps, documents))
    again = await place.publish(moved, again=True)
    assert again.published == 2500
    assert set((await place.values()).values()) == {2}


async def test_other_topics_and_datasets_are_other_publishes(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "a", made(3))
    assert [(await place.publish(path, dataset=name)).published for name in "aab"] == [3, 0, 3]


@pytest.mark.parametrize("before", [1, 999, 1000, 1001, 2000, 2345])
async def test_a_file_that_grew_publishes_what_is_new(before: int, tmp_path: Path) -> None:
    cluster = MemoryCluster({"raw": 4, ledger.TOPIC: 1})
    place = Place(bus=cluster.bus(), topic="raw")
    documents = made(2400)
    path = write(tmp_path / "a", documents[:before])
    await place.publish(path)
    write(path, documents)
    report = await place.publish(path)
    assert (report.published, report.already_published) == (2400 - before, before)
    assert await place.values() == Counter(map(orjson.dumps, documents))


async def test_a_repaired_record_alone_is_published(place: Place, tmp_path: Path) -> None:
    documents = made(1500)
    bad = lines(documents).split(b"\n")
    bad[3], bad[700] = b"{broken", b'{"no": "conversation"}'
    (tmp_path / "a").write_bytes(b"\n".join(bad))
    first = await place.publish(tmp_path / "a")
    assert (first.published, first.rejected, first.exit_code) == (1498, 2, 1)
    unchanged = await place.publish(tmp_path / "a")
    assert (unchanged.published, unchanged.rejected) == (0, 2), "what is bad is said every time"
    write(tmp_path / "a", documents)
    second = await place.publish(tmp_path / "a")
    assert (second.published, second.rejected, second.already_published) == (2, 0, 1498)
    assert await place.values() == Counter(map(orjson.dumps, documents))


async def test_equal_documents_in_a_file_are_all_published(place: Place, tmp_path: Path) -> None:
    one, two = made(2)
    path = write(tmp_path / "a", [one, two, one])
    assert (await place.publish(path)).published == 3
    write(path, [one, two, one, one])
    assert (await place.publish(path)).published == 1
    assert await place.values() == {orjson.dumps(one): 3, orjson.dumps(two): 1}


class Failing:
    """A bus whose producers fail at one commit: before it (nothing is written), or after it (all is)."""

    def __init__(self, bus: Bus, commit: int, after: bool, error: BaseException) -> None:
        self._bus, self.commits, self.after, self.error = bus, commit, after, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def producer(self, *args: Any, **options: Any) -> Producer:
        producer = await self._bus.producer(*args, **options)
        commit = producer.commit

        async def failing(sent: Any) -> None:
            self.commits -= 1
            if self.commits == 0:
                if self.after:
                    await commit(sent)
                raise self.error
            await commit(sent)

        producer.commit = failing  # type: ignore[method-assign]
        return producer


@asynccontextmanager
async def small_transactions(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(chunk, "DOCUMENTS", 50)
        patch.setattr(runs, "TRANSACTION_BYTES", 1 << 17)
        yield


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
@pytest.mark.parametrize("commit", [1, 3])
async def test_a_broker_that_fails_in_between_is_overcome(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: int, after: bool
) -> None:
    documents = made(600)
    path = write(tmp_path / "a", documents)
    bus: Any = Failing(place.bus, commit, after, ServiceUnreachable("gone for a moment"))
    async with small_transactions(monkeypatch):
        report = await publish(bus, [path], topic=place.topic)
    assert bus.commits <= 0
    assert (report.published, report.already_published) == (600, 0)
    assert await place.values() == Counter(map(orjson.dumps, documents))


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
async def test_an_interrupted_publish_repeated_has_the_effect_of_once(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    documents = made(600)
    twice = [*documents, *documents[:7]]
    path = write(tmp_path / "a", twice)
    async with small_transactions(monkeypatch):
        for commit in (1, 2, 3):
            bus: Any = Failing(place.bus, commit, after, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                await publish(bus, [path], topic=place.topic)
        report = await place.publish(path)
    assert report.published + report.already_published == 607
    assert await place.values() == Counter(map(orjson.dumps, twice))


async def test_the_older_of_two_equal_publishes_is_fenced(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = made(600)
    path = write(tmp_path / "a", documents)
    second: list[Report] = []

    async def overtake() -> None:
        second.append(await place.publish(path))

    tasks: list[asyncio.Task[None]] = []
    begun = outlet.Outlet._transaction

    async def transaction(self: outlet.Outlet, batch: outlet.Batch) -> None:
        if not tasks:
            tasks.append(asyncio.create_task(overtake()))
            await tasks[0]
        await begun(self, batch)

    monkeypatch.setattr(outlet.Outlet, "_transaction", transaction)
    async with small_transactions(monkeypatch):
        with pytest.raises(Fenced, match="publishing stopped") as caught:
            await place.publish(path)
    assert "publish again" in caught.value.hint
    assert second[0].published == 600
    assert await place.values() == Counter(map(orjson.dumps, documents))


async def test_entries_behind_an_open_transaction_of_another_count(place: Place, tmp_path: Path) -> None:
    """Read to the last stable offset only, the ledger would lack them, and all would be published twice."""
    path = write(tmp_path / "a", made(20))
    other = await place.bus.producer(f"other-{place.topic}")
    await other.begin()
    sent = await other.send(ledger.TOPIC, b"{}", key=b"other", partition=0)
    await sent
    running = asyncio.create_task(place.publish(path, dataset="waits"))
    done, _ = await asyncio.wait([running], timeout=1.5)
    assert not done, "it waits for the transaction of the other"
    await other.abort()
    await other.close()
    assert (await running).published == 20
    assert (await place.publish(path, dataset="waits")).published == 0


def test_the_transactional_id_is_of_the_command(tmp_path: Path) -> None:
    named = transactional_id("t", "d", [tmp_path / "a", tmp_path / "b"])
    assert named == transactional_id("t", "d", [str(tmp_path / "b"), str(tmp_path / "x" / ".." / "a")])
    others = [
        transactional_id("u", "d", [tmp_path / "a", tmp_path / "b"]),
        transactional_id("t", "e", [tmp_path / "a", tmp_path / "b"]),
        transactional_id("t", "d", [tmp_path / "a"]),
        transactional_id("t", "d", ["-"]),
        transactional_id("t", "d", ["-"]),
    ]
    assert len({named, *others}) == 6, "each standard input is one of its own"


async def test_ledger_entries_are_json_for_people(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "a", made(1002))
    await place.publish(path, producer="me")
    found = [orjson.loads(r.value or b"{}") for r in await read_all(place.bus, ledger.TOPIC)]
    entries = [entry for entry in found if entry.get("topic") == place.topic]
    assert [(e["documents"], e["rejected"], "hashes" in e) for e in entries] == [(1000, 0, False), (2, 0, True)]
    assert all(e["file"] == str(path) and e["producer"] == "me" and e["at_ms"] > 0 for e in entries)


async def test_foreign_records_on_the_ledger_are_left_alone() -> None:
    cluster = MemoryCluster({"raw": 4, ledger.TOPIC: 1})
    bus = cluster.bus()
    producer = await bus.producer()
    for key, value in ((b"a", b"no JSON"), (b"b", b"[]"), (b"c", None), (None, b"{}"), (b"d", b'{"documents":1}')):
        await producer.send(ledger.TOPIC, value, key=key, partition=0)
    await producer.flush()
    assert (await ledger.read(bus, "raw", "agent")).entries == {}
    assert TopicPartition(ledger.TOPIC, 0) in await bus.partitions(ledger.TOPIC)
