"""Which partitions of a member have stopped moving, and for which of them only a new worker can help.

A partition is late when it has something to do and no offset of it moved for a while. Of that time counts as standing
still what nothing explains: no batch of it is at its handler (which is slow, or hangs, and has a clock of its own in
`compute`), its records are not held back because of the backlog downstream, and the broker answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.errors import MegaflowError

if TYPE_CHECKING:
    from megaflow_stream.processing.member import Member
    from megaflow_stream.processing.partition import Partition

LOOK_SECONDS = 5.0


class Stuck(MegaflowError):
    """A partition stands still, and nothing explains it: the worker ends, so that another one begins afresh."""


@dataclass(slots=True)
class _Standing:
    part: Partition
    progress: int
    since: float
    still_seconds: float = 0.0


class Liveness:
    """Looks at the partitions of one member, again and again."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.look_seconds = min(LOOK_SECONDS, member.options.stuck_seconds / 2)
        self._ends: Mapping[TopicPartition, int] = {}
        self._answered = 0.0
        self._at = time.monotonic()
        self._standing: dict[TopicPartition, _Standing] = {}

    async def look(self) -> None:
        """Asks where the partitions end: what `late` compares to, every `look_seconds`."""
        self._ends = await self.member.bus.end_offsets(list(self.member.parts))
        self._answered = time.monotonic()

    def late(self) -> dict[str, float]:
        """Partitions that have not moved for `stuck_seconds`, and for how many. Raises `Stuck` after twice as many in
        which one stood still.

        A partition that cannot even begin, or whose transactions fail again and again, does not move either."""
        member, now = self.member, time.monotonic()
        reachable = now - self._answered < 2 * self.look_seconds
        # A worker that was frozen itself has seen nothing meanwhile.
        passed, self._at = min(now - self._at, LOOK_SECONDS), now
        patience = (
            member.options.stuck_seconds + member.processor.linger_seconds + member.processor.commit_interval_seconds
        )
        found: dict[str, float] = {}
        before, self._standing = self._standing, {}
        for tp, part in member.parts.items():
            progress = part.progress()
            behind = part.ready and not member.held_back and part.committed < self._ends.get(tp, 0)
            stood = before.get(tp)
            busy = part.bytes_in_flight or behind or not part.ready
            if stood is None or stood.part is not part or stood.progress != progress or not busy:
                stood = _Standing(part, progress, now)
            elif reachable and not part.calling:
                stood.still_seconds += passed
            self._standing[tp] = stood
            if now - stood.since > patience:
                found[f"{tp.topic}/{tp.partition}"] = now - stood.since
            if stood.still_seconds > 2 * patience:
                raise self._stuck(part, stood.still_seconds)
        return found

    def _stuck(self, part: Partition, seconds: float) -> Stuck:
        if not part.ready:
            what = "it cannot begin"
        elif part.bytes_in_flight:
            what = "its transactions do not end"
        else:
            what = "its records are there, and none is read"
        return Stuck(
            f"{self.member.processor.name} stands still for {seconds:.0f} s: {what}"
            + (f": {part.trouble}" if part.trouble else ""),
            hint="the worker ends; started again it goes on from what was committed",
            topic=part.tp.topic,
            partition=part.tp.partition,
            offset=part.committed if part.ready else None,
        )
