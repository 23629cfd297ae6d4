"""Whether a reader has stalled: aiokafka may fetch nothing for ever, in silence, though there are records."""

from __future__ import annotations

from collections.abc import Mapping

from megaflow_stream.bus.api import Bus, TopicPartition
from megaflow_stream.clock import Clock
from megaflow_stream.errors import ServiceUnreachable

STALL_SECONDS = 20.0


class Stall:
    """Watches one reader's positions: `look` after each fetch."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self.bus, self.clock = bus, clock
        self._positions: dict[TopicPartition, int] = {}
        self._since = clock.monotonic()

    async def look(self, positions: Mapping[TopicPartition, int]) -> None:
        """Raises `ServiceUnreachable`, so that the reader is replaced, where none of these positions has moved for
        `STALL_SECONDS` though there are committed records beyond one. Those of paused partitions are left out."""
        now = self.clock.monotonic()
        if positions != self._positions:
            self._positions, self._since = dict(positions), now
        elif now - self._since > STALL_SECONDS:
            for partition, end in (await self.bus.end_offsets(list(positions))).items():
                if positions[partition] < end:
                    raise ServiceUnreachable(
                        f"no record came for {STALL_SECONDS:g} s, though there are some up to offset {end}",
                        hint="is the broker up? `megaflow services status` says so",
                        topic=partition.topic,
                        partition=partition.partition,
                        offset=positions[partition],
                    )
            self._since = now
