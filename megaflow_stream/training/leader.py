"""Rank 0's other half: plans, logs the plan, reads `control`, and says at each exchange what the ranks do next.

`turn` is called by the training thread at each exchange, and never waits long: reading and logging go on in a thread of
their own. With Kafka away there is nothing to train, all ranks ask again, and nobody times out.

What is handed out is readable: the entries of a restart are given only when the ranks that own their partitions have
read up to their ends, so that no rank ever waits for Kafka within a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import orjson

from megaflow_stream.bus.api import Bus, Record, TopicPartition
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.errors import MegaflowError, NotFound
from megaflow_stream.faults import Reach, reach
from megaflow_stream.training.background import Background
from megaflow_stream.training.follow import follow
from megaflow_stream.training.gate import Gate
from megaflow_stream.training.loader import View
from megaflow_stream.training.plan import PlanEntry
from megaflow_stream.training.planlog import Logged, PlanLog, read_plan
from megaflow_stream.training.planner import Drain, Planner

AHEAD = 16  # entries handed out beyond the step being trained, and as many more logged: commits delay no step
WAIT_SECONDS = 0.2  # the longest that a turn waits for the log, when there is nothing left to train
RETRY_SECONDS = (0.1, 5.0)
CLOSE_SECONDS = 1.0
CURSOR_SECONDS = 6 * 3600.0  # a broker forgets a group's offsets after offsets.retention.minutes, by default 7 days

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Orders:
    """What all ranks do next. entries: logged, readable, not handed out before, with their offsets in the log.

    wanted: offsets that must be read up to whatever the budget of the loaders, for the next entry to become readable.
    waiting: what the ranks wait for instead of training, in words.
    advance: nothing trainable lies below these offsets, so that they count as trained. drained: this drain is done with
    them. finished: a replay has come to its end.
    """

    entries: list[Logged] = field(default_factory=list)
    wanted: dict[TopicPartition, int] = field(default_factory=dict)
    waiting: str = ""
    advance: dict[TopicPartition, int] = field(default_factory=dict)
    drained: str = ""
    checkpoint: bool = False
    stop: bool = False
    finished: bool = False

    def to_json(self) -> bytes:
        return orjson.dumps(
            {
                "entries": [[e.offset, e.entry.to_json().decode()] for e in self.entries],
                "wanted": [[p.topic, p.partition, offset] for p, offset in self.wanted.items()],
                "waiting": self.waiting,
                "advance": [[p.topic, p.partition, offset] for p, offset in self.advance.items()],
                "drained": self.drained,
                "checkpoint": self.checkpoint,
                "stop": self.stop,
                "finished": self.finished,
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> Orders:
        raw: dict[str, Any] = orjson.loads(data)
        return cls(
            entries=[Logged(offset, PlanEntry.from_json(text.encode())) for offset, text in raw["entries"]],
            wanted={TopicPartition(t, p): offset for t, p, offset in raw["wanted"]},
            waiting=raw["waiting"],
            advance={TopicPartition(t, p): offset for t, p, offset in raw["advance"]},
            drained=raw["drained"],
            checkpoint=raw["checkpoint"],
            stop=raw["stop"],
            finished=raw["finished"],
        )


class Leader:
    """One job's leader. `fence` and `open` first, in the leader's own loop.

    replay: hands out what the log holds, from its beginning, and writes nothing.
    gates: evaluations whose policy is sync.
    """

    def __init__(
        self,
        bus: Bus,
        trainer: Trainer,
        background: Background,
        *,
        reach: Reach = reach,
        replay: bool = False,
        gates: Sequence[str] = (),
        clock: Clock | None = None,
    ) -> None:
        self.bus, self.trainer, self.background, self.replay, self.reach = bus, trainer, background, replay, reach
        self.clock = clock or SystemClock()
        self.planner = Planner(trainer, self.clock)
        self.plan_log = PlanLog(bus, trainer.plan_topic, trainer.name)
        self.drain: Drain | None = None
        self.drained = ""
        self._logged: deque[Logged] = deque()
        self._appending: Future[list[Logged]] | None = None
        self._cursor_at = self.clock.monotonic()
        self._following: list[Future[None]] = []
        self.gate = Gate(bus, trainer.name, gates, self.clock) if gates and not replay else None

    async def fence(self) -> None:
        """From now on no older leader of the job writes a plan. A replay writes none itself, and fences nobody."""
        if not self.replay:
            await self.plan_log.fence()

    async def open(self, step: int, plan_cursor: int | None, trained: Mapping[TopicPartition, int]) -> None:
        """After `fence`: reads the log from `plan_cursor` on; its first entry trains step + 1."""
        if self.replay:
            found = await read_plan(self.bus, self.trainer.plan_topic, plan_cursor)
        else:
            found = await self.plan_log.read(plan_cursor)
        self.planner.planned.update(trained)
        self.planner.next_step = step + 1
        if found and found[0].entry.step != step + 1:
            raise MegaflowError(
                f"the checkpoint is of step {step}, but the plan goes on with step {found[0].entry.step}",
                hint="the plan's topic and the checkpoints belong to different runs: start the job under a new name",
                topic=self.trainer.plan_topic,
                offset=found[0].offset,
            )
        for logged in found:
            self.planner.adopt(logged.entry)
        self._logged.extend(found)
        if found:
            log.info("the plan holds %d steps beyond step %d", len(found), step)
        if self.replay:
            return
        # What a crash between a checkpoint and the plan's group left behind.
        await self.plan_log.append([], self.planner.planned)
        following = [follow(self.bus, "control", self._take_control, self.clock)]
        if self.gate is not None:
            following += [self.gate.follow(), self.gate.look()]
        self._following = [self.background.submit(work) for work in following]

    def turn(
        self,
        views: Mapping[TopicPartition, View],
        *,
        left: int,
        offsets: Mapping[TopicPartition, int],
        checkpointer_busy: bool,
    ) -> Orders:
        """views: what all ranks have read. left: entries handed out and not trained. offsets: trained up to here."""
        for following in self._following:
            if following.done():
                following.result()
        self._collect(0.0)
        orders = Orders(entries=self._readable(views, AHEAD - left))
        left += len(orders.entries)
        if self._logged:
            orders.wanted = {r.partition: r.end for r in self._logged[0].entry.ranges}
        if self.replay:
            orders.finished = not left and not self._logged
            return orders
        self._plan(views)
        if not left and self._appending is not None:
            self._collect(WAIT_SECONDS)
            orders.entries = self._readable(views, AHEAD)
            left = len(orders.entries)
            self._plan(views)
        if not left and self._appending is None and not self._logged and not checkpointer_busy:
            self._drained(views, offsets, orders)
        if self._appending is None and self.clock.monotonic() - self._cursor_at > CURSOR_SECONDS:
            self._start([])
        return orders

    def _plan(self, views: Mapping[TopicPartition, View]) -> None:
        """Logs what can be planned in the background, while the steps that were handed out are trained."""
        if self._appending is None and len(self._logged) < AHEAD:
            self.reach("rank.before_plan", step=self.planner.next_step)
            entries = self.planner.plan(views, AHEAD - len(self._logged), self.drain)
            if entries:
                self._start(entries)

    def _start(self, entries: list[PlanEntry]) -> None:
        """Logs the entries in the background, and where every partition is planned up to: quiet ones, too, whose
        offsets the broker would forget."""
        self._cursor_at = self.clock.monotonic()
        self._appending = self.background.submit(self._append(entries, dict(self.planner.planned)))

    def _readable(self, views: Mapping[TopicPartition, View], most: int) -> list[Logged]:
        found: list[Logged] = []
        while self._logged and len(found) < most:
            ranges = self._logged[0].entry.ranges
            if any(r.partition not in views for r in ranges):
                missing = next(r.partition for r in ranges if r.partition not in views)
                raise NotFound("the plan names a partition that is not there", **missing._asdict())
            if any(views[r.partition].position < r.end for r in ranges):
                break
            found.append(self._logged.popleft())
        return found

    def _collect(self, wait_seconds: float) -> None:
        if self._appending is None:
            return
        if not self._appending.done() and not wait_seconds:
            return
        try:
            self._logged.extend(self._appending.result(wait_seconds or None))
        except TimeoutError:
            if not self._appending.done():
                return
            raise
        self._appending = None

    async def _append(self, entries: list[PlanEntry], cursor: Mapping[TopicPartition, int]) -> list[Logged]:
        wait = RETRY_SECONDS[0]
        while True:
            try:
                logged = await self.plan_log.append(entries, cursor)
                if entries:
                    self.reach("rank.after_plan", step=entries[0].step)
                return logged
            except MegaflowError as error:
                if not error.retriable:
                    raise
                log.warning("the plan could not be logged, trying again: %s", error)
            await self.clock.sleep(wait)
            wait = min(wait * 2, RETRY_SECONDS[1])

    def _drained(
        self, views: Mapping[TopicPartition, View], offsets: Mapping[TopicPartition, int], orders: Orders
    ) -> None:
        drain = self.drain
        if drain is None or drain.id == self.drained or not drain.read_by({p: v.position for p, v in views.items()}):
            return
        if drain.open_in(self.planner.waiting(views)):
            return
        orders.advance = {p: end for p, end in drain.ends.items() if offsets.get(p, 0) < end}
        for p, end in orders.advance.items():
            self.planner.planned[p] = max(self.planner.planned.get(p, 0), end)
        if orders.advance:
            self._start([])
        orders.drained = self.drained = drain.id
        orders.checkpoint = True

    def _take_control(self, record: Record) -> None:
        """Keeps `drain` at the newest one of this job."""
        if record.key != self.trainer.name.encode() or not record.value:
            return
        try:
            raw = orjson.loads(record.value)
            ends = {}
            for name, end in raw["drain"].items():
                topic, _, partition = name.rpartition("/")
                if topic == self.trainer.data:
                    ends[TopicPartition(topic, int(partition))] = int(end)
            self.drain = Drain(str(raw["id"]), ends)
        except (orjson.JSONDecodeError, KeyError, ValueError, TypeError, AttributeError) as error:
            log.warning("a record on control is not understood: %s", error)

    async def close(self) -> None:
        if self._appending is not None:  # whole where the broker answers: nobody is left to try again
            await asyncio.wait({asyncio.wrap_future(self._appending)}, timeout=CLOSE_SECONDS)
        await self.plan_log.close()
