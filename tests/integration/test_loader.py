"""The loader on a real broker: order, budget, positions past markers, what it refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaflow_stream.bus import TopicPartition
from megaflow_stream.errors import Damaged, MegaflowError, RecordsExpired, SettingError
from megaflow_stream.observe import stall
from megaflow_stream.training.loader import Loader, View
from megaflow_stream.training.plan import Range
from tests.training_job import TrainingJob

Make = Callable[..., Loader]


@pytest.fixture
def job(kafka: str, s3: Any, tmp_path: Path) -> TrainingJob:
    found = TrainingJob(kafka, s3, tmp_path, partitions=2)
    asyncio.run(found.topics())
    return found


@pytest.fixture
def make(job: TrainingJob) -> Iterator[Make]:
    made: list[Loader] = []

    def new(positions: dict[int, int], **options: Any) -> Loader:
        at = {TopicPartition(job.data, p): offset for p, offset in positions.items()}
        made.append(Loader(job.bus, at, tokenizer=job.tokenizer, **options))
        return made[-1]

    yield new
    for loader in made:
        loader.close()


def look(loader: Loader, until: Callable[[dict[int, View]], bool]) -> dict[int, View]:
    """Polls until what is there is what is waited for."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        views = {p.partition: v for p, v in loader.look(10_000).items()}
        if until(views):
            return views
        time.sleep(0.01)
    raise AssertionError(views)


def planned(partition: TopicPartition, begin: int, end: int) -> Range:
    return Range(partition=partition, begin=begin, end=end, records=0, trainable_tokens=0)


def test_every_record_in_order_and_the_position_passes_markers(job: TrainingJob, make: Make) -> None:
    asyncio.run(job.write(60))
    ends = {p.partition: end for p, end in asyncio.run(job.ends()).items()}
    loader = make({0: 0, 1: 0})
    views = look(loader, lambda v: all(v[p].position >= ends[p] for p in v))
    assert sum(len(v.records) for v in views.values()) == 60
    for partition, view in views.items():
        offsets = view.records.offsets.tolist()
        assert offsets == sorted(set(offsets))
        assert offsets[-1] + 1 < ends[partition]
        assert (view.records.trainable_tokens > 0).all()


def test_a_claimed_range_is_taken_once_and_must_begin_where_the_buffer_does(job: TrainingJob, make: Make) -> None:
    asyncio.run(job.write(20))
    loader = make({0: 0})
    offsets = look(loader, lambda v: len(v[0].records) == 10)[0].records.offsets.tolist()
    partition = TopicPartition(job.data, 0)
    first = loader.claim(planned(partition, offsets[0], offsets[3]))
    assert first.offsets.tolist() == offsets[:3]
    assert loader.look(100)[partition].records.offsets.tolist() == offsets[3:]
    with pytest.raises(Damaged, match=f"its next record is at {offsets[3]}"):
        loader.claim(planned(partition, offsets[0], offsets[5]))


def test_what_one_partition_lacks_another_may_use_however_its_records_came(job: TrainingJob, make: Make) -> None:
    asyncio.run(job.write(20, partitions=[0]))
    loader = make({0: 0, 1: 0})
    for count in (1, 2, 3):  # each in a fetch of its own
        asyncio.run(job.write(1, partitions=[1]))
        look(loader, lambda v, count=count: len(v[1].records) == count and len(v[0].records) == 20)  # type: ignore[misc]
    views = {p.partition: v for p, v in loader.look(10).items()}
    assert (len(views[0].records), len(views[1].records)) == (7, 3)


def test_reading_stops_at_the_budget_and_goes_on_when_there_is_room(job: TrainingJob, make: Make) -> None:
    asyncio.run(job.write(6000, partitions=[0]))
    loader = make({0: 0}, budget_bytes=50_000)
    partition = TopicPartition(job.data, 0)
    end = asyncio.run(job.ends())[partition]
    taken, most = 0, 0
    deadline = time.monotonic() + 60
    while taken < 6000 and time.monotonic() < deadline:
        view = loader.look(100_000)[partition]
        most = max(most, len(view.records))
        if len(view.records):
            offsets = view.records.offsets.tolist()
            taken += len(loader.claim(planned(partition, offsets[0], offsets[-1] + 1)))
        else:
            time.sleep(0.01)
    assert taken == 6000
    assert most < 2000
    assert len(look(loader, lambda v: v[0].position >= end)[0].records) == 0
    assert loader.fetched_bytes == loader.claimed_bytes


def test_what_a_plan_needs_is_read_whatever_the_budget(job: TrainingJob, make: Make) -> None:
    """A step that was planned by more ranks, each with a budget, would keep fewer ranks waiting for ever."""
    asyncio.run(job.write(3000, partitions=[0]))
    loader = make({0: 0}, budget_bytes=5_000)
    partition = TopicPartition(job.data, 0)
    end = asyncio.run(job.ends())[partition]
    stuck = look(loader, lambda v: len(v[0].records) > 0)[0].position
    assert stuck < end
    loader.want({partition: end, TopicPartition(job.data, 1): 7})
    assert len(look(loader, lambda v: v[0].position >= end)[0].records) == 3000


def test_a_record_of_another_tokenizer_is_named_with_its_place(job: TrainingJob, make: Make) -> None:
    asyncio.run(job.write(4, partitions=[0]))
    asyncio.run(job.write(1, partitions=[0], tokenizer="f" * 64))
    loader = make({0: 0})
    with pytest.raises(SettingError, match=r"ffffffffffff.*partition 0, offset") as error:
        look(loader, lambda v: False)
    assert job.tokenizer[:12] in str(error.value)


def test_a_position_that_is_gone_is_a_named_error(job: TrainingJob, make: Make) -> None:
    asyncio.run(job.write(4, partitions=[0]))
    loader = make({0: 10_000})
    with pytest.raises(RecordsExpired):
        look(loader, lambda v: False)


def test_a_rank_without_partitions_reads_nothing(make: Make) -> None:
    assert make({}).look(10) == {}


def test_a_bus_that_does_not_answer_is_tried_again(job: TrainingJob) -> None:
    asyncio.run(job.write(4, partitions=[0]))
    failures = iter([MegaflowError("away"), MegaflowError("away")])

    async def connect() -> Any:
        if (error := next(failures, None)) is not None:
            error.retriable = True
            raise error
        return await job.bus()

    loader = Loader(connect, {TopicPartition(job.data, 0): 0}, tokenizer=job.tokenizer)
    try:
        look(loader, lambda v: len(v[0].records) == 4)
    finally:
        loader.close()


def test_a_client_that_stalls_in_silence_is_replaced(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(job.write(4, partitions=[0]))
    monkeypatch.setattr(stall, "STALL_SECONDS", 0.3)
    readers: list[Any] = []

    async def connect() -> Any:
        bus = await job.bus()
        make = bus.reader

        async def reader(**options: Any) -> Any:
            readers.append(await make(**options))
            if len(readers) == 1:
                readers[0].fetch = _nothing
            return readers[-1]

        bus.reader = reader  # type: ignore[method-assign]
        return bus

    loader = Loader(connect, {TopicPartition(job.data, 0): 0}, tokenizer=job.tokenizer)
    try:
        look(loader, lambda v: len(v[0].records) == 4)
        assert len(readers) == 2
    finally:
        loader.close()


async def _nothing(**options: Any) -> dict[TopicPartition, list[Any]]:
    await asyncio.sleep(0.05)
    return {}
