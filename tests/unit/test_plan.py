"""The planner: a pure function of what is available."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.errors import Damaged
from megaflow_stream.training.plan import PlanEntry, Scouted, plan_step, slices


def partition(n: int) -> TopicPartition:
    return TopicPartition("features.agent", n)


def records(*offsets: int) -> Scouted:
    found = np.array(offsets, np.int64)
    return Scouted(found, found + 10)


def test_a_full_batch_is_shared_in_proportion() -> None:
    available = {partition(0): records(*range(30)), partition(1): records(*range(10))}
    entry = plan_step(1, available, global_batch=16, micro_slice=4)
    assert entry is not None
    assert [(r.partition.partition, r.begin, r.end, r.records) for r in entry.ranges] == [(0, 0, 12, 12), (1, 0, 4, 4)]
    assert entry.ranges[0].cuts == (4, 8)
    assert entry.trainable_tokens == sum(10 + o for o in range(12)) + sum(10 + o for o in range(4))


def test_a_batch_that_does_not_fill_waits_and_is_trained_short_when_closed() -> None:
    available = {partition(0): records(3, 9), partition(1): records(5)}
    assert plan_step(1, available, global_batch=16, micro_slice=4) is None
    entry = plan_step(1, available, global_batch=16, micro_slice=4, close=True)
    assert entry is not None
    assert entry.records == 3
    assert plan_step(1, {}, global_batch=16, micro_slice=4, close=True) is None
    assert plan_step(1, {partition(0): records()}, global_batch=16, micro_slice=4, close=True) is None


def test_gaps_in_offsets_do_not_matter() -> None:
    entry = plan_step(1, {partition(0): records(5, 7, 20, 21, 40)}, global_batch=4, micro_slice=2)
    assert entry is not None
    assert [(s.begin, s.end) for s in slices(entry)] == [(5, 20), (20, 22)]


def test_an_entry_is_itself_after_its_json() -> None:
    entry = plan_step(7, {partition(1): records(1, 2, 3, 9)}, global_batch=4, micro_slice=2)
    assert entry is not None
    assert PlanEntry.from_json(entry.to_json()) == entry
    for data in (b"", b"{}", b"[]", entry.to_json().replace(b'"version":1', b'"version":9')):
        with pytest.raises(Damaged):
            PlanEntry.from_json(data)


gaps = st.lists(st.lists(st.integers(1, 5), max_size=40), min_size=1, max_size=6)


@given(gaps, st.integers(1, 5), st.integers(1, 6))
def test_every_record_is_planned_once_in_order(gaps: list[list[int]], micro_slice: int, per_batch: int) -> None:
    left = {partition(n): records(*accumulate(steps)) for n, steps in enumerate(gaps)}
    total = sum(len(v) for v in left.values())
    batch, seen = micro_slice * per_batch, 0
    for step in range(1, total + 2):
        entry = plan_step(step, left, global_batch=batch, micro_slice=micro_slice, close=True)
        if entry is None:
            break
        assert entry.records == min(batch, total - seen)
        for r in entry.ranges:
            head, left[r.partition] = left[r.partition][: r.records], left[r.partition][r.records :]
            assert (r.begin, r.end) == (head.offsets[0], head.offsets[-1] + 1)
            assert r.trainable_tokens == head.trainable_tokens.sum()
            inside = [s for s in slices(entry) if s.partition == r.partition]
            counts = [sum(s.begin <= offset < s.end for offset in head.offsets) for s in inside]
            assert counts == [micro_slice] * (r.records // micro_slice) + [r.records % micro_slice] * bool(
                r.records % micro_slice
            )
        seen += entry.records
    assert seen == total
    assert not any(len(records) for records in left.values())
