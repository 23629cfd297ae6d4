"""When a global batch closes: at its size, after linger, or at the end of bounded input. Leader's memory, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.training.loader import View
from megaflow_stream.training.plan import PlanEntry, Scouted, plan_step


@dataclass(frozen=True, slots=True)
class Drain:
    """Bounded input: when everything below these offsets is planned, the batch that is open is closed as it is."""

    id: str
    ends: Mapping[TopicPartition, int]

    def read_by(self, positions: Mapping[TopicPartition, int]) -> bool:
        """Whether everything below the ends has been read."""
        return all(positions.get(p, 0) >= end for p, end in self.ends.items())

    def open_in(self, waiting: Mapping[TopicPartition, Scouted]) -> bool:
        """Whether a record below the ends still waits to be planned."""
        return any(len(r) and r.offsets[0] < self.ends.get(p, 0) for p, r in waiting.items())


class Planner:
    """What the leader remembers between plans.

    planned: per partition the offset before which everything is planned. next_step: of the next entry.
    """

    def __init__(self, trainer: Trainer, clock: Clock | None = None) -> None:
        self.trainer = trainer
        self.clock = clock or SystemClock()
        self.planned: dict[TopicPartition, int] = {}
        self.next_step = 1
        self._waiting_since: float | None = None

    def adopt(self, entry: PlanEntry) -> None:
        """Takes an entry that stands in the log already."""
        self.next_step = entry.step + 1
        for r in entry.ranges:
            self.planned[r.partition] = max(self.planned.get(r.partition, 0), r.end)

    def waiting(self, views: Mapping[TopicPartition, View]) -> dict[TopicPartition, Scouted]:
        """The records that were read and are not planned."""
        return {p: v.records[v.records.offsets.searchsorted(self.planned.get(p, 0)) :] for p, v in views.items()}

    def plan(self, views: Mapping[TopicPartition, View], most: int, drain: Drain | None = None) -> list[PlanEntry]:
        """At most `most` new entries; they count as planned from now on, so they must be logged, or all is over."""
        available = self.waiting(views)
        entries: list[PlanEntry] = []
        while len(entries) < most:
            left = sum(len(records) for records in available.values())
            if not left:
                self._waiting_since = None
                break
            entry = plan_step(
                self.next_step,
                available,
                global_batch=self.trainer.global_batch,
                micro_slice=self.trainer.micro_slice,
                close=left < self.trainer.global_batch and self._close(views, available, drain),
            )
            if entry is None:
                break
            self._waiting_since = None
            self.adopt(entry)
            entries.append(entry)
            for r in entry.ranges:
                available[r.partition] = available[r.partition][r.records :]
        return entries

    def _close(
        self,
        views: Mapping[TopicPartition, View],
        available: Mapping[TopicPartition, Scouted],
        drain: Drain | None,
    ) -> bool:
        now = self.clock.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since >= self.trainer.linger_seconds:
            return True
        if drain is None or not drain.read_by({p: v.position for p, v in views.items()}):
            return False
        return drain.open_in(available)
