"""How ranks agree on what comes next: few small messages, only when the planned steps run low.

1. Each rank sends what it has read and nobody has planned to rank 0.
2. Rank 0's leader answers with orders, the same for all.
3. Slices that another rank trains than the one that read them travel once, all to all. Which they are, every rank
   knows from the orders alone, so without any nothing is sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import orjson

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.errors import Damaged
from megaflow_stream.training.leader import AHEAD, Orders
from megaflow_stream.training.loader import Fetched, Loader, View
from megaflow_stream.training.plan import Range, Scouted, Slice, assign, slices

_SIZE = struct.Struct("<q")


class Exchange:
    """One rank's side. owners: the rank that reads each partition.

    inbox: (step, index of the slice) -> its records, for the slices that this rank trains.
    """

    def __init__(
        self,
        communicator: Communicator,
        loader: Loader,
        owners: Mapping[TopicPartition, int],
        global_batch: int,
    ) -> None:
        self.communicator, self.loader, self.owners = communicator, loader, owners
        self.inbox: dict[tuple[int, int], tuple[Slice, Fetched]] = {}
        self._limit = 2 * AHEAD * global_batch
        self.shipped_bytes = 0

    def __call__(self, *, stop: bool, lead: Callable[[dict[TopicPartition, View], bool], Orders] | None) -> Orders:
        """lead: given on rank 0: from everybody's views, and whether anybody wants to stop, to orders."""
        rank = self.communicator.rank
        mine = _pack(self.loader.look(self._limit), stop)
        gathered = self.communicator.gather_bytes(mine, "gathering what was read")
        orders = None
        if lead is not None:
            views: dict[TopicPartition, View] = {}
            anybody = False
            for payload in gathered:
                theirs, stops = _unpack(payload)
                views |= theirs
                anybody |= stops
            orders = lead(views, anybody)
        answer = self.communicator.broadcast_bytes(orders.to_json() if orders else None, "giving orders")
        orders = orders or Orders.from_json(answer)
        self.loader.want(orders.wanted)
        outgoing: list[list[bytes]] = [[] for _ in range(self.communicator.world_size)]
        spilled = False
        for _, entry in orders.entries:
            step_slices = slices(entry)
            ranks = assign(step_slices, self.owners, self.communicator.world_size)
            claimed = {r.partition: self._claim(r) for r in entry.ranges if self.owners[r.partition] == rank}
            for i, (part, trains) in enumerate(zip(step_slices, ranks, strict=True)):
                spilled |= self.owners[part.partition] != trains
                if part.partition not in claimed:
                    continue
                records = next(claimed[part.partition])
                if trains == rank:
                    self.inbox[entry.step, i] = part, records
                else:
                    outgoing[trains].append(_pack_slice(entry.step, i, part, records))
        if spilled:
            payloads = [b"".join(parts) for parts in outgoing]
            self.shipped_bytes += sum(len(p) for p in payloads)
            for payload in self.communicator.exchange_bytes(payloads, "sending slices"):
                self._unpack_slices(payload)
        return orders

    def _claim(self, planned: Range) -> Iterator[Fetched]:
        """The records of each slice of a range.

        Raises `Damaged` where the topic holds less or other than the plan says: a hole would be trained unnoticed."""
        records = self.loader.claim(planned)
        found = len(records), int(records.trainable_tokens.sum())
        cuts = np.array(planned.cuts, np.int64)
        edges = records.offsets.searchsorted(cuts)
        if (
            found != (planned.records, planned.trainable_tokens)
            or (records.offsets.take(edges, mode="clip") != cuts).any()
        ):
            raise Damaged(
                f"the plan has {planned.records} records with {planned.trainable_tokens} trainable tokens in "
                f"[{planned.begin}, {planned.end}), the topic {found[0]} with {found[1]}",
                hint="were records deleted or rewritten? Then train on under a new name",
                **planned.partition._asdict(),
            )
        return iter([records[begin:end] for begin, end in pairwise((0, *edges.tolist(), len(records)))])

    def _unpack_slices(self, payload: bytes) -> None:
        at = 0
        while at < len(payload):
            (size,) = _SIZE.unpack_from(payload, at)
            at += _SIZE.size
            head = orjson.loads(payload[at : at + size])
            at += size
            count = head["records"]
            offsets, trainable, lengths = np.frombuffer(payload, np.int64, 3 * count, at).reshape(3, count)
            at += 3 * offsets.nbytes
            edges = [at, *(at + np.cumsum(lengths)).tolist()]
            at = edges[-1]
            part = Slice(TopicPartition(head["topic"], head["partition"]), head["begin"], head["end"])
            values = [payload[begin:end] for begin, end in pairwise(edges)]
            self.inbox[head["step"], head["index"]] = part, Fetched(offsets, trainable, values)


def _pack(views: Mapping[TopicPartition, View], stop: bool) -> bytes:
    """The length of the head, the head (JSON), the columns of each view."""
    head = orjson.dumps(
        {"stop": stop, "views": [[p.topic, p.partition, v.position, len(v.records)] for p, v in views.items()]}
    )
    columns = [c.tobytes() for v in views.values() for c in (v.records.offsets, v.records.trainable_tokens)]
    return b"".join([_SIZE.pack(len(head)), head, *columns])


def _unpack(payload: bytes) -> tuple[dict[TopicPartition, View], bool]:
    (size,) = _SIZE.unpack_from(payload)
    at = _SIZE.size + size
    raw = orjson.loads(payload[_SIZE.size : at])
    views = {}
    for topic, p, position, records in raw["views"]:
        columns = np.frombuffer(payload, np.int64, 2 * records, at).reshape(2, records)
        views[TopicPartition(topic, p)] = View(position, Scouted(*columns))
        at += columns.nbytes
    return views, raw["stop"]


def _pack_slice(step: int, index: int, part: Slice, records: Fetched) -> bytes:
    """The length of the head, the head (JSON), the columns, the values."""
    head = orjson.dumps(
        {
            "step": step,
            "index": index,
            "topic": part.partition.topic,
            "partition": part.partition.partition,
            "begin": part.begin,
            "end": part.end,
            "records": len(records),
        }
    )
    lengths = np.array([len(value) for value in records.values], np.int64)
    columns = [c.tobytes() for c in (records.offsets, records.trainable_tokens, lengths)]
    return b"".join([_SIZE.pack(len(head)), head, *columns, *records.values])
