"""Reads on in a topic, from where the last look ended: what a poll costs does not grow with the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaflow_stream.bus.api import Bus, Record, TopicPartition
from megaflow_stream.errors import NotFound
from megaflow_stream.observe.scan import scan


class Following:
    """What has come to a topic since it was asked last.

    begin: where the first call begins; without it, at everything that is retained.
    """

    def __init__(self, bus: Bus, topic: str, begin: Mapping[TopicPartition, int] | None = None) -> None:
        self.bus, self.topic = bus, topic
        self._positions = dict(begin or {})

    async def new(self) -> Sequence[Record]:
        """Committed records, in order within each partition, each of them once; none without the topic.

        After an error the same records come with the next call."""
        try:
            partitions = await self.bus.partitions(self.topic)
        except NotFound:
            return []
        begins = await self.bus.begin_offsets(partitions)
        ends = await self.bus.end_offsets(partitions)
        begin = {p: max(begins[p], self._positions.get(p, 0)) for p in partitions}
        found = [record async for record in scan(self.bus, self.topic, begin=begin, end=ends)]
        self._positions = {p: max(begin[p], ends[p]) for p in partitions}
        return found
