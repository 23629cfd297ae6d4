"""Publishing files: each conversation once, verbatim, whatever is interrupted and repeated."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from megaflow_stream.bus import Bus, Producer, Record, TopicDescription, TopicPartition, connect
from megaflow_stream.bus.partitioner import partition_of
from megaflow_stream.conversations import synthetic
from megaflow_stream.errors import Fenced, NotFound, ServiceUnreachable, SettingError, UsageError
from megaflow_stream.publishing import chunk, ledger, outlet
from megaflow_stream.publishing import run as runs
from megaflow_stream.publishing.publish import publish, transactional_id
from megaflow_stream.publishing.report import Report
from megaflow_stream.testing import MemoryCluster


@dataclass(kw_only=True)
class Place:
    """A bus and a topic of the test's own on it."""

    bus: Bus
    topic: str
    cluster: MemoryCluster | None = None

    async def publish(self, *inputs: Path, **options: Any) -> Report:
        return await publish(self.bus, inputs, topic=self.topic, **options)

    async def records(self) -> list[Record]:
        """Everything that a reader of committed records sees."""
        return await read_all(self.bus, self.topic)

    async def values(self) -> Counter[bytes]:
        return Counter(record.value or b"" for record in await self.records())


async def read_all(bus: Bus, topic: str) -> list[Record]:
    partitions = await bus.partitions(topic)
    ends = await bus.end_offsets(partitions)
    begins = await bus.begin_offsets(partitions)
    wanted = {p for p in partitions if ends[p] > begins[p]}
    found: list[Record] = []
    reader = await bus.reader()
    try:
        if wanted:
            reader.assign({p: begins[p] for p in wanted})
        while wanted:
            for records in (await reader.fetch()).values():
                found += records
            wanted = {p for p in wanted if await reader.position(p) < ends[p]}
    finally:
        await reader.close()
    return found


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


def lines(documents: Iterable[object]) -> bytes:
    return b"".join(orjson.dumps(document) + b"\n" for document in documents)


def made(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return list(synthetic.documents(count, seed))


def write(path: Path, documents: Iterable[object]) -> Path:
    path.write_bytes(lines(documents))
    return path


async def test_records_are_the_documents_verbatim_under_their_ids(place: Place, tmp_path: Path) -> None:
    spaced = b'{ "id": "own", "messages": [ {"role": "user", "content": "Hi"} ], "n": 1e2 }'
    nameless = b'{"conversations":[{"from":"human","value":"Hi"}]}'
    (tmp_path / "a").write_bytes(spaced + b"\n" + nameless)
    report = await place.publish(tmp_path / "a", dataset="d", producer="p")
    assert (report.published, report.rejected, report.bytes) == (2, 0, len(spaced) + len(nameless))
    assert report.by_format == {"openai_chat": 1, "sharegpt": 1}
    by_value = {record.value: record for record in await place.records()}
    assert set(by_value) == {spaced, nameless}
    assert by_value[spaced].key == b"own"
    assert len(by_value[nameless].key or b"") == 32
    for record in by_value.values():
        assert record.partition == partition_of(record.key or b"", 4)
        headers = dict(record.headers)
        trace = headers.pop("traceparent").split(b"-")
        assert [len(part) for part in trace] == [2, 32, 16, 2]
        assert headers == {
            "content-type": b"application/json",
            "schema": b"megaflow.raw/1",
            "dataset": b"d",
            "producer": b"p",
            "format": b"openai_chat" if record.value == spaced else b"sharegpt",
        }


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


async def test_the_same_id_with_other_content_is_kept_and_counted(place: Place, tmp_path: Path) -> None:
    one, two, three = made(3)
    path = write(tmp_path / "a", [one, {**two, "id": one["id"]}, three, one])
    report = await place.publish(path)
    assert (report.published, report.same_id_other_content) == (4, 1)
    assert sorted(record.key or b"" for record in await place.records()).count(one["id"].encode()) == 3


async def test_bad_records_have_file_line_and_reason(place: Place, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "LICENSE").write_text("You may.")
    good, other = made(2)
    (tmp_path / "in" / "a").write_bytes(lines([good, {"a": 1}]) + b'{"x\n' + lines([[1], other]))
    rejects = tmp_path / "rejects.jsonl"
    report = await place.publish(tmp_path / "in", rejects=rejects)
    assert (report.published, report.rejected, report.exit_code) == (2, 3, 1)
    assert report.passed_files == [str(tmp_path / "in" / "LICENSE")]
    written = [orjson.loads(line) for line in rejects.read_bytes().splitlines()]
    assert [reject["line"] for reject in written] == [2, 3, 4]
    assert [reject["raw"] for reject in written] == ['{"a":1}', '{"x', "[1]"]
    assert all(reject["file"] == str(tmp_path / "in" / "a") and reject["reason"] for reject in written)
    assert str(report.first_rejects[0]).startswith(f"{tmp_path / 'in' / 'a'}:2: no known format")
    assert (await place.publish(tmp_path / "in", skip_bad=True)).exit_code == 0


async def test_a_record_larger_than_the_topic_takes_is_a_reject(place: Place, tmp_path: Path) -> None:
    await place.bus.alter_topic(place.topic, {"max.message.bytes": "20000"})
    sizes = [19_000, 30_000, 10]
    path = write(tmp_path / "a", [{"messages": [{"role": "user", "content": "x" * size}]} for size in sizes])
    report = await place.publish(path)
    assert (report.published, report.rejected) == (2, 1)
    assert "the topic takes 20000" in report.first_rejects[0].reason


async def test_a_dry_run_sends_nothing(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(lines(made(5)) + b"{\n")
    for bus in (place.bus, None):
        report = await publish(bus, [path], topic=place.topic, dry_run=True)
        assert (report.published, report.rejected, report.exit_code) == (5, 1, 1)
    assert not await place.records()


async def test_wrong_use(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "a", made(1))
    with pytest.raises(UsageError, match="there is no file"):
        await place.publish(tmp_path / "b")
    with pytest.raises(SettingError, match="there is no format"):
        await place.publish(path, format="alpaca")
    with pytest.raises(UsageError, match="overwrite the input"):
        await place.publish(path, rejects=path)
    with pytest.raises(NotFound) as caught:
        await publish(place.bus, [path], topic=f"none-{os.urandom(4).hex()}")
    assert caught.value.hint
    assert not await place.records()


async def test_progress_sees_the_report_grow(tmp_path: Path) -> None:
    cluster = MemoryCluster({"raw": 4, ledger.TOPIC: 1})
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(lines(made(2500))))
    seen: list[tuple[int, int]] = []
    report = await publish(
        cluster.bus(), [path], topic="raw", progress=lambda r: seen.append((r.read_bytes, r.published))
    )
    assert len(seen) == 5
    assert seen[-1] == (report.total_bytes, 2500)
    assert seen == sorted(seen)


async def test_everything_of_tau_bench(place: Place, real_data: Path) -> None:
    await place.bus.alter_topic(place.topic, {"max.message.bytes": str(8 << 20)})
    report = await place.publish(real_data / "tau-bench")
    assert (report.published, report.rejected, report.by_format) == (288, 0, {"tau_bench": 288})
    assert len(await place.records()) == 288
    assert (await place.publish(real_data / "tau-bench")).published == 0


# Interrupted and repeated


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
    named = transactional_id("t", "d", "p", [tmp_path / "a", tmp_path / "b"])
    assert named == transactional_id("t", "d", "p", [str(tmp_path / "b"), str(tmp_path / "x" / ".." / "a")])
    others = [
        transactional_id("u", "d", "p", [tmp_path / "a", tmp_path / "b"]),
        transactional_id("t", "e", "p", [tmp_path / "a", tmp_path / "b"]),
        transactional_id("t", "d", "p", [tmp_path / "a"]),
        transactional_id("t", "d", "p", ["-"]),
        transactional_id("t", "d", "q", ["-"]),
    ]
    assert len({named, *others}) == 6


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
