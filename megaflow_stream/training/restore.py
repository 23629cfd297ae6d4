"""Where a rank begins: the head's state, alike on all ranks; or the definition's own, at step 0.

Rank 0 reads the checkpoint (verified, one manifest back where it is damaged) and checks that Kafka still holds what
comes next; the others receive the tensors by broadcast.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
from torch import nn
from torch.optim import Optimizer

from megaflow_stream.bus.api import Bus, TopicPartition
from megaflow_stream.checkpoint import Head, TensorSpec, load, names
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.errors import MegaflowError, NotFound, RecordsExpired
from megaflow_stream.storage.api import ObjectStore
from megaflow_stream.training.snapshot import put_back, put_back_groups, put_back_scalars

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Begin:
    """Where training begins. state: the manifest's, {} for a fresh job. offsets: next to train, of every partition."""

    state: dict[str, Any] = field(default_factory=dict)
    offsets: dict[TopicPartition, int]
    tensors: Sequence[tuple[TensorSpec, memoryview]] = ()
    head: Head | None = None
    fallback: Sequence[str] = ()

    @property
    def step(self) -> int:
        return int(self.state.get("step", 0))

    @property
    def plan_cursor(self) -> int | None:
        cursor = self.state.get("plan_cursor")
        return None if cursor is None else int(cursor)


async def read_begin(store: ObjectStore, bus: Bus, trainer: Trainer, job: str, *, fresh: bool = False) -> Begin:
    """On rank 0. fresh: begin at step 0 whatever is stored; the job's head is deleted (a replay: a chain of its own).

    Raises `RecordsExpired` where Kafka does not hold the next record any more, or never did."""
    partitions = await bus.partitions(trainer.data)
    if fresh:
        await store.delete(names.head(job))
        return Begin(offsets=await bus.begin_offsets(partitions))
    try:
        loaded = await load(store, job)
    except NotFound:
        return Begin(offsets=await bus.begin_offsets(partitions))
    saved = {_partition(name): offset for name, offset in loaded.manifest.offsets.items()}
    gone = sorted(set(saved) - set(partitions))
    if gone:
        raise MegaflowError(
            f"the checkpoint has offsets of {gone[0].topic}/{gone[0].partition}, which is not a partition of "
            f"{trainer.data}",
            hint="was the trainer given another data topic? Then start the job under a new name",
            manifest=loaded.key,
        )
    offsets = await check_offsets(bus, partitions, saved)
    for skipped in loaded.skipped:
        log.warning("the checkpoint of step %d is damaged and left out: %s", skipped.step, skipped.reason)
    return Begin(
        state=dict(loaded.manifest.state),
        offsets=offsets,
        tensors=loaded.tensors,
        head=loaded.head,
        fallback=[s.manifest for s in loaded.skipped],
    )


async def check_offsets(
    bus: Bus, partitions: Sequence[TopicPartition], saved: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """begin <= saved <= end for each partition; one that is new to the checkpoint begins at its first record."""
    begin = await bus.begin_offsets(partitions)
    end = await bus.end_offsets(partitions, isolation="read_uncommitted")
    for p in partitions:
        offset = saved.get(p, begin[p])
        if offset < begin[p]:
            raise RecordsExpired(
                f"training would go on at offset {offset}, but the topic begins at {begin[p]}: "
                f"{begin[p] - offset} offsets are gone",
                hint="raise the topic's retention; to go on without those records, start the job under a new name",
                topic=p.topic,
                partition=p.partition,
            )
        if offset > end[p]:
            raise RecordsExpired(
                f"training would go on at offset {offset}, but the topic ends at {end[p]}: it is not the topic that "
                "was trained",
                hint="was the topic deleted and made again? Then start the job under a new name",
                topic=p.topic,
                partition=p.partition,
            )
    return {p: saved.get(p, begin[p]) for p in partitions}


def share(communicator: Communicator, begin: Begin | None) -> Begin:
    """Rank 0 gives its own, the others None; all return the same, less the head, which rank 0 alone needs."""
    payload = None
    if begin is not None:
        payload = orjson.dumps(
            {
                "state": begin.state,
                "offsets": [[p.topic, p.partition, o] for p, o in begin.offsets.items()],
                "tensors": [[s.name, s.dtype, list(s.shape), s.kind] for s, _ in begin.tensors],
            }
        )
    raw = orjson.loads(communicator.broadcast_bytes(payload, "restoring"))
    if begin is None:
        specs = [TensorSpec(name, dtype, tuple(shape), kind) for name, dtype, shape, kind in raw["tensors"]]
        begin = Begin(
            state=raw["state"],
            offsets={TopicPartition(t, p): o for t, p, o in raw["offsets"]},
            tensors=[(spec, memoryview(bytearray(spec.size_bytes))) for spec in specs],
        )
    for spec, view in begin.tensors:
        if spec.size_bytes:
            communicator.broadcast_buffer(torch.frombuffer(view, dtype=torch.uint8), f"restoring {spec.name}")
    return begin


def put_in(begin: Begin, trainer: Trainer, model: nn.Module, optimizer: Optimizer, schedule: Any) -> None:
    """Puts the state into this rank's model, optimizer and schedule. A fresh job's are as they were built."""
    if not begin.state:
        return
    put_back(begin.tensors, model, optimizer, trainer.trainable)
    put_back_groups(optimizer, begin.state["optimizer_groups"])
    put_back_scalars(model, optimizer, begin.state.get("optimizer_scalars", {}))
    if schedule is not None:
        schedule.load_state_dict(begin.state["schedule"])
    seed = begin.state["rng"]["seed"]
    if seed != trainer.seed:
        log.warning("the job began with the seed %d, the definition says %d: the former counts", seed, trainer.seed)


def _partition(name: str) -> TopicPartition:
    topic, _, partition = name.rpartition("/")
    return TopicPartition(topic, int(partition))
