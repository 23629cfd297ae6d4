"""How ranks agree on what comes next: few small messages, only when the planned steps run low.

1. Each rank sends what it has read and nobody has planned to rank 0.
2. Rank 0's leader answers with orders, the same for all.
3. Slices that another rank trains than the one that read them travel once, all to all. Which they are, every rank
   knows from the orders alone, so without any nothing is sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import orjson

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.errors import Damaged
from megaflow_stream.training.leader import AHEAD, Orders
from megaflow_stream.training.loader import Fetched, Loader, View
from megaflow_stream.training.plan import Range, Scouted, Slice, assign, slices

_SIZE, _HEAD = struct.Struct("<q"), struct.Struct("<qqi")


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
        self.inbox: dict[tuple[int, int], tuple[Slice, list[Fetched]]] = {}
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
            claimed: dict[TopicPartition, list[Fetched]] = {}
            for i, (part, trains) in enumerate(zip(step_slices, ranks, strict=True)):
                reads = self.owners[part.partition]
                spilled |= reads != trains
                if reads == rank:
                    records = self.loader.claim(part)
                    claimed.setdefault(part.partition, []).extend(records)
                    if trains == rank:
                        self.inbox[entry.step, i] = part, records
                    else:
                        outgoing[trains].append(_pack_slice(entry.step, i, part, records))
            for planned in entry.ranges:
                if planned.partition in claimed:
                    _compare(planned, claimed[planned.partition])
        if spilled:
            payloads = [b"".join(parts) for parts in outgoing]
            self.shipped_bytes += sum(len(p) for p in payloads)
            for payload in self.communicator.exchange_bytes(payloads, "sending slices"):
                self._unpack_slices(payload)
        return orders

    def _unpack_slices(self, payload: bytes) -> None:
        at = 0
        while at < len(payload):
            (size,) = _SIZE.unpack_from(payload, at)
            at += _SIZE.size
            head = orjson.loads(payload[at : at + size])
            at += size
            records = []
            for _ in range(head["records"]):
                offset, trainable, length = _HEAD.unpack_from(payload, at)
                at += _HEAD.size
                records.append(Fetched(offset, trainable, payload[at : at + length]))
                at += length
            part = Slice(TopicPartition(head["topic"], head["partition"]), head["begin"], head["end"])
            self.inbox[head["step"], head["index"]] = part, records


def _compare(planned: Range, records: Sequence[Fetched]) -> None:
    """Raises `Damaged` where the topic holds less or other than the plan says: a hole would be trained unnoticed."""
    found = len(records), sum(record.trainable_tokens for record in records)
    if found != (planned.records, planned.trainable_tokens):
        raise Damaged(
            f"the plan has {planned.records} records with {planned.trainable_tokens} trainable tokens in "
            f"[{planned.begin}, {planned.end}), the topic {found[0]} with {found[1]}",
            hint="were records deleted or rewritten? Then train on under a new name",
            topic=planned.partition.topic,
            partition=planned.partition.partition,
        )


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


def _pack_slice(step: int, index: int, part: Slice, records: list[Fetched]) -> bytes:
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
    parts = [_SIZE.pack(len(head)), head]
    for f in records:
        parts += [_HEAD.pack(f.offset, f.trainable_tokens, len(f.value)), f.value]
    return b"".join(parts)
