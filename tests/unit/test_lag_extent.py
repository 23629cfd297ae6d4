"""What a gap of offsets is in records and bytes, from the part of it that was read."""

from __future__ import annotations

from megaflow_stream.bus import TopicPartition
from megaflow_stream.observe.lag import _extent, _Gap, offsets_of


def test_a_gap_that_was_read_to_its_end_is_counted() -> None:
    assert _extent(_Gap(10, 20, records=0, size_bytes=0, position=20)) == (0, 0, True)
    assert _extent(_Gap(10, 20, records=4, size_bytes=400, position=20)) == (4, 400, True)


def test_a_gap_that_was_read_in_part_is_scaled_and_said_to_be_an_estimate() -> None:
    assert _extent(_Gap(0, 1000, records=80, size_bytes=800, position=100)) == (800, 8000, False)


def test_a_gap_of_which_nothing_was_read_is_its_offsets_at_most() -> None:
    assert _extent(_Gap(0, 1000, position=0)) == (1000, 0, False)


def test_positions_are_read_by_topic_and_partition() -> None:
    found = offsets_of({"features.agent/3": 7, "odd": 1, "a/b": 2, "c/0": "x"})
    assert found == {TopicPartition("features.agent", 3): 7}
    assert offsets_of(None) == {}
