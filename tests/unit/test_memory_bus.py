"""The bus in memory beyond what Kafka shows too: injected faults, running a processor, determinism."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest

from megaflow_stream.bus import TopicPartition
from megaflow_stream.bus.partitioner import murmur2
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.processor import (
    Deduplicate,
    Dropped,
    Handler,
    Processor,
    Rejected,
    Result,
    Sink,
    Statistic,
)
from megaflow_stream.errors import BusError, Fenced, NotFound, ServiceUnreachable, SettingError
from megaflow_stream.testing import MemoryCluster, drive, run_processor

IN = TopicPartition("in", 0)
DECLARED = """
import os

import pyarrow as pa

from megaflow_stream.definitions.processor import Processor, Result, Sink


def build():
    def handle(batch):
        if b"bad" in batch["value"].to_pylist():
            raise ValueError("it is bad")
        values = [b"%d" % os.getpid() for _ in range(batch.num_rows)]
        return Result(outputs={"out": pa.record_batch([pa.array(values, pa.binary())], ["value"])})

    return handle


pids = Processor(name="pids", source="in", build=build, sinks=[Sink(topic="out")])
"""


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster({"in": 1, "out": 1})


@dataclass(frozen=True)
class Upper:
    """Upper case of each value; b"bad" raises, b"no" is rejected, b"drop" is dropped."""

    arrow: bool = False

    def __call__(self) -> Handler:
        return self.handle

    def handle(self, batch: pa.RecordBatch) -> Result:
        values, dropped, rejected = [], [], []
        for offset, value in zip(batch["offset"].to_pylist(), batch["value"].to_pylist(), strict=True):
            if value == b"bad":
                raise ValueError("it is bad")
            if value == b"no":
                rejected.append(Rejected(offset, "no"))
            elif value == b"drop":
                dropped.append(Dropped(offset, "c", "asked"))
            else:
                values.append(value.upper())
        made = pa.record_batch([pa.array(values, pa.binary())], ["value"])
        count = Statistic("d", "p", {"in": batch.num_rows})
        return Result(outputs={"out": made}, dropped=dropped, rejected=rejected, statistics=[count])


upper = Processor(
    name="upper",
    source="in",
    build=Upper(),
    sinks=[Sink(topic="out", headers={"schema": "x/1"})],
    batch_records=4,
    commit_interval_seconds=0.0,
)


def values(cluster: MemoryCluster, topic: str = "out") -> list[bytes | None]:
    return [record.value for record in cluster.records(topic)]


def test_murmur2_gives_what_kafkas_own_tests_expect() -> None:
    # org.apache.kafka.common.utils.UtilsTest.testMurmur2
    expected = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536, b"abc": 479470107}
    for key, signed in expected.items():
        assert murmur2(key) == signed % (1 << 32)


class TestInjected:
    async def test_abort_next(self, cluster: MemoryCluster) -> None:
        producer = await cluster.bus().producer("id")
        cluster.inject.abort_next("id")
        await producer.begin()
        sent = [await producer.send("out", b"lost", partition=0)]
        await producer.send_offsets("group", {IN: 1})
        with pytest.raises(Fenced):
            await producer.commit(sent)
        assert values(cluster) == []
        assert [r.value for r in cluster.records("out", isolation="read_uncommitted")] == [b"lost"]
        assert cluster.committed("group") == {}
        fresh = await cluster.bus().producer("id")
        await fresh.begin()
        await fresh.commit([await fresh.send("out", b"kept", partition=0)])
        assert [(r.offset, r.value) for r in cluster.records("out")] == [(2, b"kept")]

    async def test_fence(self, cluster: MemoryCluster) -> None:
        producer = await cluster.bus().producer("id")
        await producer.begin()
        await (await producer.send("out", b"lost", partition=0))
        cluster.inject.fence("id")
        with pytest.raises(Fenced):
            await (await producer.send("out", b"more", partition=0))
        assert cluster.topic("out").logs[0].stable == 2

    async def test_unreachable(self, cluster: MemoryCluster) -> None:
        bus = cluster.bus()
        cluster.inject.unreachable(calls=2)
        for _ in range(2):
            with pytest.raises(ServiceUnreachable):
                await bus.topics()
        assert set(await bus.topics()) == {"in", "out"}

    async def test_gap(self, cluster: MemoryCluster) -> None:
        cluster.publish("in", b"a")
        cluster.inject.gap(IN, 5)
        cluster.publish("in", b"b")
        assert [r.offset for r in cluster.records("in")] == [0, 6]

    async def test_late_markers(self, cluster: MemoryCluster) -> None:
        producer = await cluster.bus().producer("id")
        cluster.inject.late_markers("id")
        await producer.begin()
        sent = [await producer.send("out", b"v", partition=0)]
        await producer.send_offsets("group", {IN: 1})
        await producer.commit(sent)
        assert values(cluster) == []
        assert cluster.committed("group") == {}
        await cluster.bus().producer("id")  # waits for what the older one decided
        assert values(cluster) == [b"v"]
        assert cluster.committed("group") == {IN: 1}

    async def test_a_rebalance_moves_partitions(self) -> None:
        cluster = MemoryCluster({"in": 2})
        owned: list[set[TopicPartition]] = [set(), set()]

        @dataclass
        class Member:
            number: int

            async def on_assigned(self, partitions: list[TopicPartition]) -> None:
                owned[self.number] = set(partitions)

            async def on_revoked(self, partitions: list[TopicPartition]) -> None:
                owned[self.number] = set()

        readers = [await cluster.bus().group_reader("g", ["in"], Member(number)) for number in range(2)]
        group = cluster.group("g")
        await group.settled()
        before, generation = [set(own) for own in owned], group.generation
        cluster.inject.rebalance("g")
        await group.settled()
        assert owned == before[::-1]
        assert group.generation == generation + 1
        for reader in readers:
            await reader.close()
        await group.settled()

    async def test_redeliver(self, cluster: MemoryCluster) -> None:
        producer = await cluster.bus().producer("id")
        await producer.begin()
        await producer.send_offsets("one", {IN: 7})
        await producer.commit([])
        cluster.inject.redeliver(IN, 3, group="another")
        assert cluster.committed("one") == {IN: 7}
        cluster.inject.redeliver(IN, 3)
        assert cluster.committed("one") == {IN: 3}
        await cluster.group("one").settled()


class TestLimits:
    async def test_a_partition_is_read_in_pieces_of_the_fetch_size(self, cluster: MemoryCluster) -> None:
        for number in range(6):
            cluster.publish("in", b"%d" % number * 1000)
        reader = await cluster.bus().reader(partition_fetch_bytes=2500)
        reader.assign({IN: 0})
        assert [len((await reader.fetch())[IN]) for _ in range(3)] == [2, 2, 2]
        assert await reader.fetch(timeout_seconds=0) == {}

    async def test_a_waiting_fetch_gets_what_is_written_meanwhile(self, cluster: MemoryCluster) -> None:
        reader = await cluster.bus().reader()
        reader.assign({IN: 0})
        waiting = asyncio.create_task(reader.fetch(timeout_seconds=60))
        await asyncio.sleep(0)
        cluster.publish("in", b"v")
        assert [r.value for r in (await waiting)[IN]] == [b"v"]

    async def test_unknown_topics_and_partitions(self, cluster: MemoryCluster) -> None:
        bus = cluster.bus()
        producer = await bus.producer()
        for topic, partition in (("nowhere", 0), ("in", 9)):
            with pytest.raises(NotFound):
                await producer.send(topic, b"v", partition=partition)
            with pytest.raises(NotFound):
                await bus.end_offsets([TopicPartition(topic, partition)])

    async def test_a_deleted_topic_takes_its_offsets_along(self, cluster: MemoryCluster) -> None:
        bus = cluster.bus()
        producer = await bus.producer("id")
        await producer.begin()
        await producer.send_offsets("g", {IN: 1, TopicPartition("out", 0): 1})
        await producer.commit([])
        await bus.delete_topic("in")
        assert await bus.committed("g") == {TopicPartition("out", 0): 1}

    async def test_new_partitions_are_shared_out(self, cluster: MemoryCluster) -> None:
        class Member:
            owned: list[TopicPartition]

            async def on_assigned(self, partitions: list[TopicPartition]) -> None:
                self.owned = partitions

            async def on_revoked(self, partitions: list[TopicPartition]) -> None: ...

        member = Member()
        reader = await cluster.bus().group_reader("g", ["in"], member)
        await cluster.bus().add_partitions("in", 3)
        await cluster.group("g").settled()
        assert member.owned == [TopicPartition("in", number) for number in range(3)]
        await reader.close()
        with pytest.raises(BusError):
            await reader.fetch()


class TestRunProcessor:
    def test_each_record_has_one_fate(self) -> None:
        given = [b"a", b"bad", b"b", b"drop", b"c", b"no", b"d"]
        outcome = run_processor(upper, [(None, value, []) for value in given])
        assert [record.value for record in outcome.outputs["out"]] == [b"A", b"B", b"C", b"D"]
        assert list(outcome.outputs["out"][0].headers) == [("schema", b"x/1")]
        assert outcome.dropped == [Dropped(3, "c", "asked")]
        assert outcome.rejected == [Rejected(1, "ValueError: it is bad"), Rejected(5, "no")]
        assert sum(found.counts["in"] for found in outcome.statistics) == 6

    def test_duplicates_and_headers(self) -> None:
        stateful = replace(upper, state=Deduplicate(changelog="state"), headers=["dataset"])
        key = b"k" * 16
        first = [(key, b"bad", {}), (b"other", b"x", {}), (b"other", b"x", {}), (b"other", b"x", {})]
        second = [(key, b"a", {}), (key, b"a", {"conversation": b"again"})]
        outcome = run_processor(stateful, first + second)
        # The first copy was rejected, so the next batch's counts as the first. Keys that are no hash are not compared.
        assert [record.value for record in outcome.outputs["out"]] == [b"X", b"X", b"X", b"A"]
        assert outcome.dropped == [Dropped(5, "again", "duplicate")]

    def test_arrow_outputs(self) -> None:
        arrow = replace(upper, sinks=[Sink(topic="out", format="arrow")])
        outcome = run_processor(arrow, [(None, b"%c" % letter, []) for letter in b"abcde"])
        assert [batch["value"].to_pylist() for batch in outcome.batches("out")] == [[b"A", b"B", b"C", b"D"], [b"E"]]

    def test_an_output_without_a_sink_is_a_mistake_of_the_declaration(self) -> None:
        with pytest.raises(SettingError, match="out"):
            run_processor(replace(upper, sinks=[Sink(topic="other")]), [(None, b"a", [])])


class TestDrive:
    async def test_every_fate_is_in_its_topic(self, cluster: MemoryCluster) -> None:
        for value in (b"a", b"bad", b"b", b"drop", b"no"):
            cluster.publish("in", value, headers=[("dataset", b"d")])
        await drive(cluster, upper)
        assert values(cluster) == [b"A", b"B"]
        assert values(cluster, "dlq") == [b"bad", b"no"]
        assert dict(cluster.records("dlq")[0].headers)["dataset"] == b"d"
        assert len(values(cluster, "conversations.dropped")) == 1
        assert cluster.committed(upper.group) == {IN: 5}

    @pytest.mark.parametrize("fault", ["abort_next", "fence", "rebalance", "gap", "unreachable"])
    async def test_each_input_counts_once_whatever_happens(self, cluster: MemoryCluster, fault: str) -> None:
        strikes = 0

        def strike() -> bool:
            """After each commit, three times."""
            nonlocal strikes
            done = cluster.committed(upper.group).get(IN, 0)
            if strikes < 3 and done > strikes * 8:
                strikes += 1
                if fault in ("abort_next", "fence"):
                    getattr(cluster.inject, fault)(f"{upper.group}.in.0")
                elif fault == "rebalance":
                    cluster.inject.rebalance(upper.group)
                elif fault == "gap":
                    cluster.inject.gap(IN, 3)
                else:
                    cluster.inject.unreachable(calls=3)
            return strikes == 3 and done >= cluster.log(IN).stable

        for number in range(40):
            cluster.publish("in", b"v%d" % number)
        await drive(cluster, upper, until=strike)
        assert values(cluster) == [b"V%d" % number for number in range(40)]

    async def test_with_a_compute_process(self, cluster: MemoryCluster, tmp_path: Path) -> None:
        path = tmp_path / "declared_for_drive.py"
        path.write_text(DECLARED)
        (declared,) = definitions(path, Processor)
        for value in (b"a", b"bad", b"b"):
            cluster.publish("in", value)
        await drive(cluster, declared, path=path)
        pid, _ = values(cluster)
        assert int(pid or b"0") != os.getpid()
        assert dict(cluster.records("dlq")[0].headers)["error"] == b"ValueError: it is bad"

    async def test_the_next_owner_waits_for_what_was_decided(self, cluster: MemoryCluster) -> None:
        for number in range(4):
            cluster.publish("in", b"v%d" % number)
        cluster.inject.late_markers(f"{upper.group}.in.0")
        await drive(cluster, upper, until=lambda: len(cluster.records("out", isolation="read_uncommitted")) == 4)
        assert values(cluster) == []
        assert cluster.committed(upper.group) == {}
        await drive(cluster, upper)
        assert values(cluster) == [b"V0", b"V1", b"V2", b"V3"]

    async def test_what_an_operator_moves_back_comes_again(self, cluster: MemoryCluster) -> None:
        for number in range(6):
            cluster.publish("in", b"v%d" % number)
        await drive(cluster, upper)
        cluster.inject.redeliver(IN, 4)
        await drive(cluster, upper)
        assert values(cluster) == [b"V%d" % number for number in (0, 1, 2, 3, 4, 5, 4, 5)]

    async def test_a_worker_that_cannot_go_on_says_why(self, cluster: MemoryCluster) -> None:
        for _ in range(4):
            cluster.publish("in", b"v")
        await drive(cluster, upper)
        cluster.truncate(IN, 4)
        cluster.inject.redeliver(IN, 2)
        with pytest.raises(Exception, match="older than the first retained, 4"):
            await drive(cluster, upper, until=lambda: False)

    async def test_what_never_comes_true_ends_in_time(self, cluster: MemoryCluster) -> None:
        with pytest.raises(TimeoutError, match="upper stands at"):
            await drive(cluster, upper, until=lambda: False, timeout_seconds=0.05)
