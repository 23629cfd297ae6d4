"""Sharing a step's slices among ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.training.plan import Slice, assign, owner


def step(*partitions: int) -> list[Slice]:
    return [Slice(TopicPartition("f", p), i, i + 1) for i, p in enumerate(partitions)]


def owners(partitions: int, world_size: int) -> dict[TopicPartition, int]:
    return {TopicPartition("f", p): owner(p, partitions, world_size) for p in range(partitions)}


def test_partitions_are_owned_in_contiguous_runs() -> None:
    assert [owner(p, 4, 2) for p in range(4)] == [0, 0, 1, 1]
    assert [owner(p, 4, 3) for p in range(4)] == [0, 0, 1, 2]
    assert [owner(p, 4, 8) for p in range(4)] == [0, 2, 4, 6]


def test_each_trains_what_it_reads_where_that_is_level() -> None:
    assert assign(step(0, 1, 2, 3), owners(4, 2), 2) == [0, 0, 1, 1]


def test_one_partition_spills_to_idle_ranks() -> None:
    assert assign(step(0, 0, 0, 0), owners(4, 2), 2) == [0, 0, 1, 1]
    assert assign(step(0, 0, 0), owners(1, 4), 4) == [0, 1, 2]


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 7))
def test_the_load_is_level_and_the_answer_is_a_function(partitions: list[int], world_size: int) -> None:
    slices = step(*partitions)
    ranks = assign(slices, owners(6, world_size), world_size)
    assert ranks == assign(slices, owners(6, world_size), world_size)
    share = -(-len(slices) // world_size)
    assert all(0 <= r < world_size and ranks.count(r) <= share for r in ranks)
