"""The de-duplicator's state: what a rejected record leaves, what a lost offset or a lost entry does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa
import pytest

from megaflow_stream.bus import TopicPartition
from megaflow_stream.definitions.processor import Deduplicate, Handler, Processor, Rejected, Result, Sink, Statistic
from megaflow_stream.errors import Damaged
from megaflow_stream.processing.partition import OffsetsLost
from megaflow_stream.testing import MemoryCluster, create_topics, drive, run_processor
from megaflow_stream.testing.reader import MemoryReader

KEY = b"k" * 16
STATE = TopicPartition("state", 0)


def build() -> Handler:
    def handle(batch: pa.RecordBatch) -> Result:
        """Rejects `foo`, fails on `bar`, passes what is of another dataset."""
        columns = [batch[name].to_pylist() for name in ("offset", "value", "header:dataset")]
        rows = list(zip(*columns, strict=True))
        if any(dataset == b"bar" for _, _, dataset in rows):
            raise ValueError("bar")
        out = pa.record_batch([pa.array([v for _, v, d in rows if d != b"foo"], pa.binary())], ["value"])
        rejected = [Rejected(offset, "foo") for offset, _, dataset in rows if dataset == b"foo"]
        counts = [Statistic("all", "p", {"rejected": len(rejected)})] if rejected else []
        return Result(outputs={"out": out}, rejected=rejected, statistics=counts)

    return handle


processor = Processor(
    name="once",
    source="in",
    build=build,
    headers=("dataset",),
    sinks=[Sink(topic="out")],
    state=Deduplicate(changelog="state"),
)


@pytest.fixture
def cluster() -> MemoryCluster:
    cluster = MemoryCluster({"in": 1})
    create_topics(cluster, processor)
    return cluster


def publish(cluster: MemoryCluster, first: int, count: int) -> None:
    for value in (b"%d" % number for number in range(first, first + count)):
        cluster.publish("in", value, key=hashlib.blake2b(value, digest_size=16).digest())


def values(cluster: MemoryCluster, topic: str) -> list[bytes | None]:
    return [record.value for record in cluster.records(topic)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bad", [b"foo", b"bar"])
async def test_copies_of_a_rejected_record_get_their_chance_also_in_its_batch(
    cluster: MemoryCluster, apart: bool, bad: bytes
) -> None:
    datasets = (bad, bad, b"agent", b"agent")
    for number, dataset in enumerate(datasets):
        cluster.publish("in", b"%d" % number, key=KEY, headers=[("dataset", dataset)])
        if apart:
            await drive(cluster, processor)
    await drive(cluster, processor)
    assert values(cluster, "dlq") == [b"0", b"1"]
    assert values(cluster, "out") == [b"2"]
    assert [orjson.loads(value or b"")["offset"] for value in values(cluster, "conversations.dropped")] == [3]
    assert len(b"".join(value or b"" for value in values(cluster, "state"))) == 24
    outcome = run_processor(processor, [(KEY, b"%d" % n, {"dataset": d}) for n, d in enumerate(datasets)])
    assert [rejected.offset for rejected in outcome.rejected] == [0, 1]
    assert [record.value for record in outcome.outputs["out"]] == [b"2"]
    assert [dropped.offset for dropped in outcome.dropped] == [3]


@pytest.mark.parametrize("tries", [1, 2])
async def test_each_rejected_record_is_counted_once(cluster: MemoryCluster, tries: int) -> None:
    for dataset in (b"foo", b"bar", b"agent"):
        cluster.publish("in", dataset, headers=[("dataset", dataset)])
    await drive(cluster, replace(processor, tries=tries))
    assert values(cluster, "dlq") == [b"foo", b"bar"]
    counted = [orjson.loads(value or b"")["counts"] for value in values(cluster, "processing.statistics")]
    assert sum(counts.get("rejected", 0) for counts in counted) == 2


async def test_a_group_that_has_lost_its_offsets_doubles_nothing(cluster: MemoryCluster) -> None:
    publish(cluster, 0, 10)
    await drive(cluster, processor)
    cluster.groups[processor.group].offsets.clear()  # as a broker does to a group without workers, after a week
    with pytest.raises(OffsetsLost, match="has no committed offset, and its state was made before offset 10") as lost:
        await drive(cluster, processor)
    assert "--to-offset 10" in lost.value.hint
    assert lost.value.where == {"topic": "in", "partition": 0}
    cluster.groups[processor.group].offsets[TopicPartition("in", 0)] = 10
    publish(cluster, 5, 10)
    await drive(cluster, processor)
    assert values(cluster, "out") == [b"%d" % number for number in range(15)]


async def batches(cluster: MemoryCluster, count: int) -> None:
    for number in range(count):
        publish(cluster, 3 * number, 3)
        await drive(cluster, processor)


@pytest.mark.parametrize("lost", [0, 2])
async def test_an_entry_that_the_log_has_lost_is_told(cluster: MemoryCluster, lost: int) -> None:
    await batches(cluster, 5)
    log = cluster.log(STATE)
    del log._offsets[lost], log._entries[lost]
    publish(cluster, 0, 3)
    message = f"{3 * lost} entries of the state were read where its changelog counts {3 * lost + 3}"
    with pytest.raises(Damaged, match=message) as told:
        await drive(cluster, processor)
    assert told.value.where["topic"] == "state"
    assert len(values(cluster, "out")) == 15


@pytest.mark.parametrize("skipped", ["all", "end"])
async def test_a_reader_that_skips_records_is_told(
    cluster: MemoryCluster, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers have been seen that stood at the log's end at once, without an error."""
    await batches(cluster, 5)
    fetch, struck = MemoryReader.fetch, 0

    async def skipping(self: MemoryReader, **options: Any) -> Mapping[TopicPartition, Sequence[Any]]:
        nonlocal struck
        found = await fetch(self, **options)
        if STATE in found and not struck:
            struck = 1
            return {STATE: found[STATE][:3]} if skipped == "end" else {}
        return found

    monkeypatch.setattr(MemoryReader, "fetch", skipping)
    publish(cluster, 0, 16)
    with pytest.raises(Damaged, match=f"{9 if skipped == 'end' else 0} entries of the state were read, .* has 15"):
        await drive(cluster, processor)
    await drive(cluster, processor)  # it was the reader, not the log
    assert len(values(cluster, "out")) == 16


async def test_a_log_without_its_beginning_is_restored(cluster: MemoryCluster) -> None:
    await batches(cluster, 5)
    cluster.truncate(STATE, cluster.records("state")[2].offset)
    publish(cluster, 6, 3)
    await drive(cluster, processor)
    assert len(values(cluster, "out")) == 15
    publish(cluster, 0, 3)  # what retention took is not known any more
    await drive(cluster, processor)
    assert len(values(cluster, "out")) == 18
