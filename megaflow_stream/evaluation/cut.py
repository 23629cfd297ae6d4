"""A cut: which validation records an evaluation is over, as the end offset of each partition.

Two losses can be compared only when their cuts are equal.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaflow_stream.bus.api import Bus, TopicPartition

Cut = Mapping[str, int]
"""TOPIC/PARTITION -> the offset before which committed records count; the form of the topic `evaluations`."""


async def take(bus: Bus, topic: str) -> dict[str, int]:
    """The cut at what is committed now. Raises `NotFound` without the topic."""
    ends = await bus.end_offsets(await bus.partitions(topic))
    return {f"{p.topic}/{p.partition}": ends[p] for p in sorted(ends)}


def partitions(cut: Cut) -> dict[TopicPartition, int]:
    """The same by partition, in order."""
    found = {}
    for name, end in cut.items():
        topic, _, number = name.rpartition("/")
        found[TopicPartition(topic, int(number))] = end
    return dict(sorted(found.items()))
