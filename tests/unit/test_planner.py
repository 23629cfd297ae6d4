"""When a batch closes: size, linger, drain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.training.loader import View
from megaflow_stream.training.plan import Scouted
from megaflow_stream.training.planner import Drain, Planner

P0, P1 = TopicPartition("f", 0), TopicPartition("f", 1)


@dataclass
class Hand:
    """A clock moved by hand."""

    at: float = 0.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds


def planner(clock: Hand) -> Planner:
    trainer = Trainer(
        name="t",
        data="f",
        validation="v",
        tokenizer="t",
        build_model=lambda: None,
        loss=lambda m, b: (None, 0),
        build_optimizer=lambda p: None,
        global_batch=4,
        micro_slice=2,
        linger_seconds=2.0,
    )
    return Planner(trainer, clock)


def view(*offsets: int, position: int) -> View:
    found = np.array(offsets, np.int64)
    return View(position, Scouted(found, np.ones_like(found)))


def test_full_batches_are_planned_at_once_and_never_twice() -> None:
    found = planner(Hand())
    views = {P0: view(*range(9), position=9)}
    entries = found.plan(views, 16)
    assert [(e.step, e.ranges[0].begin, e.ranges[0].end) for e in entries] == [(1, 0, 4), (2, 4, 8)]
    assert found.plan(views, 16) == []
    assert found.plan({P0: view(*range(12), position=12)}, 1)[0].ranges[0].begin == 8


def test_a_batch_that_does_not_fill_is_closed_after_linger() -> None:
    clock = Hand()
    found = planner(clock)
    views = {P0: view(5, position=6)}
    assert found.plan(views, 16) == []
    clock.at = 1.9
    assert found.plan(views, 16) == []
    clock.at = 2.0
    assert [e.records for e in found.plan(views, 16)] == [1]
    clock.at = 10.0
    assert found.plan({P0: view(5, 7, position=8)}, 16) == []


def test_a_drain_closes_only_when_everything_below_it_was_read() -> None:
    found = planner(Hand())
    drain = Drain("d", {P0: 8, P1: 4})
    assert found.plan({P0: view(6, position=8), P1: view(position=3)}, 16, drain) == []
    entries = found.plan({P0: view(6, position=8), P1: view(3, position=4)}, 16, drain)
    assert [e.records for e in entries] == [2]
    assert found.plan({P0: view(9, position=10), P1: view(position=4)}, 16, drain) == []


def test_an_entry_of_the_log_counts_as_planned() -> None:
    first, second = planner(Hand()), planner(Hand())
    views = {P0: view(*range(6), position=6), P1: view(*range(6), position=6)}
    for entry in (entries := first.plan(views, 2)):
        second.adopt(entry)
    assert len(entries) == 2
    assert (second.next_step, second.planned) == (first.next_step, first.planned)
    left = {p: records.offsets.tolist() for p, records in second.waiting(views).items()}
    assert left == {p: records.offsets.tolist() for p, records in first.waiting(views).items()}
    assert sum(map(len, left.values())) == 12 - sum(e.records for e in entries)
