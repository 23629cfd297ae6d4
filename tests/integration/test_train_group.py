"""A job on real Kafka and S3, its ranks as threads: plan, drain, resume, other world sizes, equal bits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from megaflow_stream import faults
from megaflow_stream.bus import TopicPartition
from megaflow_stream.checkpoint import load, names
from megaflow_stream.errors import Fenced, RecordsExpired, SettingError
from megaflow_stream.observe.scan import scan
from megaflow_stream.storage.api import ObjectInfo, Precondition
from megaflow_stream.storage.s3 import S3Store
from megaflow_stream.training import leader
from megaflow_stream.training.checkpointing import HeadAppeared
from megaflow_stream.training.planlog import PlanLog, read_plan
from megaflow_stream.training.progress import Phase, Progress
from tests.training_job import ThreadGroup, TrainingJob, final, trained

torch = pytest.importorskip("torch")


@pytest.fixture
def job(kafka: str, s3: Any, tmp_path: Path) -> TrainingJob:
    found = TrainingJob(kafka, s3, tmp_path)
    asyncio.run(found.topics())
    return found


def drained(job: TrainingJob, ranks: int, generation: int = 1) -> ThreadGroup:
    """Trains to the end of what is there now, then stops."""
    name = asyncio.run(job.drain())
    group = ThreadGroup(job.job, ranks, generation)
    group.wait("drained", drain=name)
    group.stop.asked = True
    group.join()
    return group


def expected(job: TrainingJob) -> list[str]:
    return sorted(f"conversation-{n}" for n in range(2 * job.written))


async def announcements(job: TrainingJob) -> list[dict[str, Any]]:
    bus = await job.bus()
    found = [orjson.loads(r.value or b"") async for r in scan(bus, "checkpoints") if r.key == job.name.encode()]
    await bus.close()
    return found


def test_everything_is_trained_once_and_any_number_of_ranks_gives_the_same_bits(job: TrainingJob) -> None:
    asyncio.run(job.write(60))
    group = drained(job, 2)
    rows = asyncio.run(trained(job))
    assert sorted(c for _, _, c, _ in rows) == expected(job)
    steps = group.named("step")
    assert [e["step"] for e in steps] == list(range(1, 9))
    assert steps[-1]["records"] == 60
    assert steps[-1]["loss"] < steps[0]["loss"]
    said = asyncio.run(announcements(job))[-1]
    ends = asyncio.run(job.ends())
    assert said["offsets"] == {f"{p.topic}/{p.partition}": end for p, end in ends.items()}
    assert (said["step"], said["records"]) == (8, 60)
    for ranks in (1, 3):
        replay = ThreadGroup(job.with_(replay=True), ranks)
        assert final(replay.join())["weights_sha256"] == final(group.events)["weights_sha256"]
        assert asyncio.run(trained(job, f"{job.name}.replay")) == rows
    assert asyncio.run(announcements(job))[-1] == said


def test_a_restart_with_other_ranks_goes_on_where_the_checkpoint_is(job: TrainingJob) -> None:
    asyncio.run(job.write(50))
    drained(job, 1)
    asyncio.run(job.write(45))
    drained(job, 4, generation=2)
    asyncio.run(job.write(5))
    group = drained(job, 2, generation=3)
    rows = asyncio.run(trained(job))
    assert sorted(c for _, _, c, _ in rows) == expected(job)
    replay = ThreadGroup(job.with_(replay=True), 1)
    assert final(replay.join())["weights_sha256"] == final(group.events)["weights_sha256"]
    assert asyncio.run(trained(job, f"{job.name}.replay")) == rows


def test_planned_steps_beyond_the_checkpoint_are_trained_as_they_stand(job: TrainingJob) -> None:
    asyncio.run(job.write(80))
    first = ThreadGroup(job.with_(until_step=4), 2)
    assert final(first.join())["step"] == 4
    before = asyncio.run(plan(job))
    assert len(before) > 4
    group = drained(job, 1, generation=2)
    assert asyncio.run(plan(job))[: len(before)] == before
    assert final(group.events)["step"] == 10
    assert sorted(c for _, _, c, _ in asyncio.run(trained(job))) == expected(job)


async def plan(job: TrainingJob) -> list[Any]:
    bus = await job.bus()
    found = await read_plan(bus, f"plan.{job.name}")
    await bus.close()
    return found


async def cursor(job: TrainingJob) -> dict[TopicPartition, int]:
    bus = await job.bus()
    await (await bus.producer("megaflow.train." + job.name)).close()  # what is committed is seen for certain now
    found = await bus.committed(f"megaflow.train.{job.name}")
    await bus.close()
    return found


def test_the_group_of_the_job_is_at_the_end_of_what_is_planned(job: TrainingJob) -> None:
    asyncio.run(job.write(80))
    first = ThreadGroup(job.with_(until_step=4), 1)
    first.join()
    planned = {TopicPartition(job.data, p): 0 for p in range(job.partitions)}
    for logged in asyncio.run(plan(job)):
        planned |= {r.partition: r.end for r in logged.entry.ranges}
    assert asyncio.run(cursor(job)) == planned
    drained(job, 2, generation=2)
    assert asyncio.run(cursor(job)) == asyncio.run(job.ends())  # past the markers, too
    before = asyncio.run(plan(job))
    ThreadGroup(job.with_(replay=True), 1).join()
    assert asyncio.run(plan(job)) == before


def test_the_offsets_of_quiet_partitions_are_kept_fresh(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker forgets what a group without members has not committed for a week, partition by partition."""
    commits: list[tuple[int, Mapping[TopicPartition, int]]] = []
    append = PlanLog.append

    async def spy(log: PlanLog, entries: Any, cursor: Any = None) -> Any:
        commits.append((len(entries), cursor))
        return await append(log, entries, cursor)

    monkeypatch.setattr(PlanLog, "append", spy)
    monkeypatch.setattr(leader, "CURSOR_SECONDS", 0.5)
    asyncio.run(job.write(12, partitions=[2]))
    group = ThreadGroup(job.job, 1)
    group.wait("step", step=2)
    while commits[-1][0] or len(commits) < 4:  # the last of all, while idle
        time.sleep(0.05)
    group.stop.asked = True
    group.join()
    assert all(len(cursor) == job.partitions for _, cursor in commits)
    assert sum(entries for entries, _ in commits) == 2


def test_what_is_no_order_on_control_is_passed_over(job: TrainingJob) -> None:
    async def odd() -> None:
        bus = await job.bus()
        producer = await bus.producer()
        for key, value in ((b"\xff", b"{}"), (job.name.encode(), b"no json"), (job.name.encode(), b"[1]")):
            await (await producer.send("control", value, key=key, partition=0))
        await producer.close()
        await bus.close()

    asyncio.run(job.write(3))
    asyncio.run(odd())
    drained(job, 1)
    assert sorted(c for _, _, c, _ in asyncio.run(trained(job))) == expected(job)


def test_a_short_batch_is_trained_after_linger_without_a_drain(job: TrainingJob) -> None:
    asyncio.run(job.write(3))
    group = ThreadGroup(job.job, 2)
    assert group.wait("step")["records"] == 3
    group.stop.asked = True
    group.join()
    assert sorted(c for _, _, c, _ in asyncio.run(trained(job))) == expected(job)


def test_records_of_one_partition_keep_all_ranks_busy_and_are_fetched_once(job: TrainingJob) -> None:
    asyncio.run(job.write(64, partitions=[1]))
    group = drained(job, 3)
    ranks = group.named("rank")
    assert sum(r["shipped_bytes"] for r in ranks) > 0
    assert sum(r["fetched_bytes"] for r in ranks) == sum(r["trained_bytes"] for r in ranks)
    assert sorted(c for _, _, c, _ in asyncio.run(trained(job))) == expected(job)


def test_nothing_new_trains_nothing_and_a_drain_is_answered(job: TrainingJob) -> None:
    asyncio.run(job.write(10))
    drained(job, 1)
    said = asyncio.run(announcements(job))
    again = drained(job, 1, generation=2)
    assert again.named("step") == []
    assert asyncio.run(announcements(job)) == said


def test_a_second_leader_fences_the_first(job: TrainingJob) -> None:
    asyncio.run(job.write(16))
    first = ThreadGroup(job.job, 1)
    first.wait("step", count=2)
    second = ThreadGroup(job.job, 1, generation=2)
    second.wait("started")
    asyncio.run(job.write(16))
    with pytest.raises(Fenced):
        first.join()
    second.wait("step", records=32)
    second.stop.asked = True
    second.join()
    assert sorted(c for _, _, c, _ in asyncio.run(trained(job))) == expected(job)


def test_a_head_write_of_a_killed_leader_that_is_in_flight_does_not_end_the_next_one(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(job.write(80))
    ThreadGroup(job.with_(until_step=4), 1).join()
    data, etag = asyncio.run(take_head(job))
    late = arrives_late(monkeypatch, names.head(job.name), data + b" ", if_match=etag)
    second = ThreadGroup(job.with_(until_step=10), 1, generation=2)
    assert final(second.join())["step"] == 10
    assert [type(answer) for answer in late] == [Precondition]
    assert sorted(c for _, _, c, _ in asyncio.run(trained(job))) == expected(job)


def test_where_it_is_the_first_head_of_all_the_next_leader_starts_again_from_it(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(job.write(80))
    ThreadGroup(job.with_(until_step=4), 1).join()
    data, _ = asyncio.run(take_head(job, delete=True))
    late = arrives_late(monkeypatch, names.head(job.name), data, if_none_match=True)
    second = ThreadGroup(job.with_(until_step=4), 1, generation=2)
    with pytest.raises(HeadAppeared) as error:
        second.join()
    assert error.value.retriable  # so the launcher starts the ranks again
    assert [type(answer) for answer in late] == [ObjectInfo]
    third = ThreadGroup(job.with_(until_step=10), 1, generation=3)
    third.wait("started", step=4)
    third.join()
    assert sorted(c for _, _, c, _ in asyncio.run(trained(job))) == expected(job)


async def take_head(job: TrainingJob, *, delete: bool = False) -> tuple[bytes, str]:
    """The head as stored, and its etag."""
    store = await job.store()
    data, info = await store.get(names.head(job.name))
    if delete:
        await store.delete(names.head(job.name))
    await store.close()
    return data, info.etag


def arrives_late(monkeypatch: pytest.MonkeyPatch, key: str, data: bytes, **condition: Any) -> list[object]:
    """A write that reaches the store while the next chunk is on its way; its answer, or its error."""
    answers: list[object] = []
    put = S3Store.put

    async def during(store: S3Store, chunk: str, value: Any, **more: Any) -> Any:
        if "/chunks/" in chunk and not answers:
            answers.append(None)
            try:
                answers[0] = await put(store, key, data, **condition)
            except Precondition as error:
                answers[0] = error
        return await put(store, chunk, value, **more)

    monkeypatch.setattr(S3Store, "put", during)
    return answers


def test_a_stop_during_an_upload_ends_with_a_last_checkpoint(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SIGTERM sets is set while chunks are on their way; the upload ends only after training has ended."""
    asyncio.run(job.write(80))
    ending, put, sign = threading.Event(), S3Store.put, Progress.sign
    groups: list[ThreadGroup] = []

    async def slow(store: S3Store, key: str, data: Any, **condition: Any) -> Any:
        if "/chunks/" in key:
            groups[0].stop.asked = True
            await asyncio.to_thread(ending.wait, 60)
        return await put(store, key, data, **condition)

    def signed(progress: Progress, phase: Phase, step: int) -> None:
        if phase is Phase.STOPPING:
            ending.set()
        sign(progress, phase, step)

    monkeypatch.setattr(S3Store, "put", slow)
    monkeypatch.setattr(Progress, "sign", signed)
    groups.append(ThreadGroup(job.job, 2))
    end = final(groups[0].join())
    assert ending.is_set()
    head = asyncio.run(announcements(job))[-1]
    assert head["step"] == end["step"] >= 5
    assert max(step for *_, step in asyncio.run(trained(job))) == end["step"]


def test_features_of_another_tokenizer_are_refused_by_name(job: TrainingJob) -> None:
    asyncio.run(job.write(2, tokenizer="another" * 4))
    group = ThreadGroup(job.job, 1)
    with pytest.raises(SettingError, match=f"anotheranoth.*{job.tokenizer[:12]}"):
        group.wait("step")


def test_an_announcement_that_was_lost_is_made_again(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(job.write(16))
    monkeypatch.setattr(faults, "_faults", [{"point": "rank.after_save", "step": 2, "action": "raise"}])
    monkeypatch.setattr(faults, "_reached", {})
    with pytest.raises(RuntimeError, match=r"rank\.after_save"):
        drained(job, 1)
    assert asyncio.run(announcements(job)) == []
    monkeypatch.setattr(faults, "_faults", [])
    drained(job, 1, generation=2)
    again = asyncio.run(announcements(job))
    assert [a["step"] for a in again] == [2]
    assert again[0]["records"] == 16


def test_a_topic_that_was_made_again_is_a_named_error(job: TrainingJob) -> None:
    asyncio.run(job.write(16))
    drained(job, 1)

    async def remake() -> None:
        bus = await job.bus()
        await bus.delete_topic(job.data)
        while job.data in await bus.topics():
            await asyncio.sleep(0.05)
        await bus.close()
        await job.topics()

    asyncio.run(remake())
    group = ThreadGroup(job.job, 1, generation=2)
    with pytest.raises(RecordsExpired, match="the topic ends at 0"):
        group.wait("started")


def test_the_manifest_holds_what_a_resume_and_a_reader_need(job: TrainingJob) -> None:
    asyncio.run(job.write(48))
    drained(job, 2)

    async def head() -> Any:
        store = await job.store()
        loaded = await load(store, job.name)
        await store.close()
        return loaded

    loaded = asyncio.run(head())
    state = loaded.manifest.state
    assert {"offsets", "plan_cursor", "generation", "rng", "schedule", "scaler", "steps", "totals"} <= set(state)
    assert {s.name for s, _ in loaded.tensors if s.kind == "optimizer"} >= {"optimizer/embedding.weight/exp_avg"}
    assert set(loaded.manifest.offsets) == {f"{job.data}/{p}" for p in range(job.partitions)}
    assert loaded.manifest.definition["tokenizer"] == job.tokenizer
    assert TopicPartition(job.data, 0) in asyncio.run(job.ends())
