"""The plan: which records a global step trains, as a pure function of what can be read, and how ranks share a step.

A step is a set of half-open offset ranges, at most one a partition, cut into micro-slices of consecutive records of one
partition. That, and nothing about ranks, is what the plan's log holds; `assign` shares a step's slices among any
number of ranks. Offsets have gaps, so a range also states how many records it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.errors import Damaged

VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Scouted:
    """Records of one partition that can be planned, in offset order, as columns.

    offsets, trainable_tokens: int64 [n]; of each record its offset and its trained tokens.
    """

    offsets: NDArray[np.int64]
    trainable_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, part: slice) -> Scouted:
        return Scouted(self.offsets[part], self.trainable_tokens[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Records of one partition with begin <= offset < end. cuts: where its slices after the first begin."""

    partition: TopicPartition
    begin: int
    end: int
    records: int
    trainable_tokens: int
    cuts: tuple[int, ...] = ()


class Slice(NamedTuple):
    """A micro-slice, what one forward and backward trains: records of one partition with begin <= offset < end."""

    partition: TopicPartition
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """What one global step trains. Steps are counted from 1."""

    step: int
    ranges: tuple[Range, ...]

    @property
    def records(self) -> int:
        return sum(r.records for r in self.ranges)

    @property
    def trainable_tokens(self) -> int:
        return sum(r.trainable_tokens for r in self.ranges)

    def to_json(self) -> bytes:
        ranges = [
            {
                "topic": r.partition.topic,
                "partition": r.partition.partition,
                "begin": r.begin,
                "end": r.end,
                "records": r.records,
                "trainable_tokens": r.trainable_tokens,
                "cuts": r.cuts,
            }
            for r in self.ranges
        ]
        return orjson.dumps({"version": VERSION, "step": self.step, "ranges": ranges})

    @classmethod
    def from_json(cls, data: bytes) -> PlanEntry:
        """Raises `Damaged` for anything that is not an entry of this version."""
        try:
            raw = orjson.loads(data)
            if raw["version"] != VERSION:
                raise Damaged(f"a plan entry of version {raw['version']}, expected {VERSION}")
            ranges = tuple(
                Range(
                    partition=TopicPartition(r["topic"], r["partition"]),
                    begin=r["begin"],
                    end=r["end"],
                    records=r["records"],
                    trainable_tokens=r["trainable_tokens"],
                    cuts=tuple(r["cuts"]),
                )
                for r in raw["ranges"]
            )
            return cls(step=raw["step"], ranges=ranges)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise Damaged(f"not a plan entry: {type(error).__name__}: {error}") from error


def plan_step(
    step: int,
    available: Mapping[TopicPartition, Scouted],
    *,
    global_batch: int,
    micro_slice: int,
    close: bool = False,
) -> PlanEntry | None:
    """The entry of `step`, from records not planned yet, in offset order: the first ones of each partition.

    None when they do not fill `global_batch` records, unless `close`: then a short entry, of all there are (None
    when there is none). Full slices are taken from the partitions in proportion to what they hold (by highest
    averages, D'Hondt), then the short ends, the largest first, until the batch is full.
    """
    waiting = {p: len(records) for p, records in available.items() if len(records)}
    total = sum(waiting.values())
    if not total or (total < global_batch and not close):
        return None
    left = min(global_batch, total)
    taken: Counter[TopicPartition] = Counter()
    full = [(-n / micro_slice, p.partition, p) for p, n in waiting.items() if n >= micro_slice]
    heapify(full)
    while full and left >= micro_slice:
        _, number, best = full[0]
        taken[best] += micro_slice
        left -= micro_slice
        if waiting[best] - taken[best] >= micro_slice:
            heapreplace(full, (-waiting[best] / (taken[best] + micro_slice), number, best))
        else:
            heappop(full)
    for p in sorted(waiting, key=lambda p: (taken[p] - waiting[p], p)):
        more = min(waiting[p] - taken[p], left)
        taken[p] += more
        left -= more
    ranges = [_range(p, available[p][:n], micro_slice) for p, n in sorted(taken.items()) if n]
    return PlanEntry(step=step, ranges=tuple(ranges))


def _range(partition: TopicPartition, records: Scouted, micro_slice: int) -> Range:
    return Range(
        partition=partition,
        begin=int(records.offsets[0]),
        end=int(records.offsets[-1]) + 1,
        records=len(records),
        trainable_tokens=int(records.trainable_tokens.sum()),
        cuts=tuple(records.offsets[micro_slice::micro_slice].tolist()),
    )


def slices(entry: PlanEntry) -> list[Slice]:
    """The micro-slices of a step, in the order that numbers them."""
    out = []
    for r in entry.ranges:
        edges = (r.begin, *r.cuts, r.end)
        out += [Slice(r.partition, a, b) for a, b in pairwise(edges)]
    return out


def owner(index: int, partitions: int, world_size: int) -> int:
    """The rank that reads partition number `index` of so many: contiguous, and even to within one."""
    return index * world_size // max(1, partitions)


def assign(step_slices: Sequence[Slice], owners: Mapping[TopicPartition, int], world_size: int) -> list[int]:
    """The rank that trains each slice: its reader, unless that has its share; then the least loaded, lowest one.

    No rank has more than the share rounded up. A function of the entry, the topic's partitions and the world size.
    """
    share = -(-len(step_slices) // world_size)
    load = [0] * world_size
    ranks = [-1] * len(step_slices)
    for i, s in enumerate(step_slices):
        if load[owners[s.partition]] < share:
            ranks[i] = owners[s.partition]
            load[ranks[i]] += 1
    for i, rank in enumerate(ranks):
        if rank < 0:
            ranks[i] = load.index(min(load))
            load[ranks[i]] += 1
    return ranks
