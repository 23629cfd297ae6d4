"""A rank's life: restore, then exchange and step until told to stop.

A step, on every rank alike:

    1. its share of the step's micro-slices, forward and backward; gradients are added as integers;
    2. one reduction of gradients, counts and flags;
    3. one division, clipping, optimizer, schedule: the same bits everywhere; or, where a slice was not finite or
       nothing was trained, the same nothing everywhere;
    4. what the flags say: a checkpoint, an exchange, the end.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import pyarrow as pa
import torch
from torch import nn
from torch.optim import Optimizer

from megaflow_stream import faults
from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.elastic.reduction import BitAccumulator, Flag, Reduced
from megaflow_stream.errors import Damaged
from megaflow_stream.training.alike import compare_weights
from megaflow_stream.training.checkpointing import Checkpointer
from megaflow_stream.training.exchange import Exchange
from megaflow_stream.training.frozen import frozen
from megaflow_stream.training.leader import AHEAD, Leader, Orders
from megaflow_stream.training.lineage import LineageRows, from_bytes
from megaflow_stream.training.loader import Loader, View
from megaflow_stream.training.plan import PlanEntry, slices
from megaflow_stream.training.planlog import Logged
from megaflow_stream.training.progress import Phase, Progress
from megaflow_stream.training.restore import Begin
from megaflow_stream.training.slice import open_slice
from megaflow_stream.training.snapshot import SnapshotBuffer, groups_json, scalars_json, state_tensors
from megaflow_stream.training.totals import Times, Totals

IDLE_SECONDS = 0.1  # between exchanges while there is nothing to train
EXCHANGE_SECONDS = 0.25  # between exchanges while steps are planned, at the least

Report = Callable[[str, Mapping[str, Any]], None]
log = logging.getLogger(__name__)


class Rank:
    """One rank of a group, built and restored. `run` trains until told to stop; returns the last step.

    stopping: whether this rank was asked to end; any rank's wish ends all. gated: after each checkpoint, ask the leader
        before the next step. leader, checkpointer: on rank 0 only.
    report(event, numbers): what happened, for people and status.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: Any,
        communicator: Communicator,
        loader: Loader,
        owners: Mapping[TopicPartition, int],
        begin: Begin,
        progress: Progress,
        stopping: Callable[[], bool] = lambda: False,
        gated: bool = False,
        leader: Leader | None = None,
        checkpointer: Checkpointer | None = None,
        until_step: int | None = None,
        report: Report = lambda event, numbers: None,
        clock: Clock | None = None,
    ) -> None:
        self.trainer, self.model, self.optimizer, self.schedule = trainer, model, optimizer, schedule
        self.communicator, self.loader, self.progress = communicator, loader, progress
        self.leader, self.checkpointer, self.report = leader, checkpointer, report
        self.clock = clock or SystemClock()
        self.device = communicator.device
        self.seed = int(begin.state.get("rng", {}).get("seed", trainer.seed))
        named = dict(model.named_parameters())
        self.accumulator = BitAccumulator(
            [p for name, p in named.items() if trainer.trainable(name)], trainer.quantum_bits
        )
        self.exchange = Exchange(communicator, loader, owners, trainer.global_batch)
        self.owners = owners
        self.step = begin.step
        self.offsets = dict(begin.offsets)
        self.plan_cursor = begin.plan_cursor
        self.totals = Totals(**begin.state.get("totals", {}))
        self.times = Times()
        self.stopping = stopping
        self.gated = gated
        self.drained = ""
        ends = [n for n in (until_step, trainer.max_steps) if n is not None]
        self.until_step = min(ends) if ends else None
        self._entries: deque[Logged] = deque()
        self._lineage = LineageRows()
        self._buffer = SnapshotBuffer()
        self._gated = False
        self._exchange_wanted = True
        self._exchanged_at = -1e9
        self._steps: list[tuple[int, float | None, int, float]] = []  # step, loss, tokens, seconds since a checkpoint
        self._saved: tuple[int, dict[TopicPartition, int]] = (begin.step, dict(begin.offsets))

    @frozen()
    def run(self) -> int:
        """Trains. The last checkpoint is stored when it returns."""
        self.report("started", {"step": self.step, "world_size": self.communicator.world_size})
        while True:
            if self.until_step is not None and self.step >= self.until_step:
                break
            if self._gated or self._exchange_wanted or not self._entries:
                orders = self._exchange()
                if orders.stop:
                    break
                self._gated = bool(orders.waiting)
                if orders.advance or orders.drained or orders.checkpoint:
                    self._advance(orders)
                if orders.finished:
                    break
                if self._gated or not self._entries:
                    continue
            flags = self._train(self._entries.popleft())
            if Flag.STOP in flags:
                break
            self._exchange_wanted = Flag.EXCHANGE in flags
            if Flag.CHECKPOINT in flags:
                self._checkpoint()
        self.progress.sign(Phase.STOPPING, self.step)
        self._checkpoint(last=True)
        return self.step

    def _reach(self, point: str, step: int) -> None:
        faults.reach(point, rank=self.communicator.rank, step=step, generation=self.communicator.generation)

    def _exchange(self) -> Orders:
        began = time.monotonic()
        self.progress.sign(Phase.EXCHANGE if self._entries else Phase.IDLE, self.step)
        self._reach("rank.before_exchange", self.step + 1)
        orders = self.exchange(stop=self.stopping(), lead=self._lead if self.leader else None)
        self._entries.extend(orders.entries)
        now = time.monotonic()
        self._exchanged_at = now
        self._exchange_wanted = False
        if self._entries and not orders.waiting:
            self.times.data_wait += now - began
        else:
            self.times.idle += now - began
            if self.leader is not None:
                waiting = {"waiting_for": orders.waiting} if orders.waiting else {}
                self.report("waiting" if waiting else "idle", {"step": self.step, **waiting})
        return orders

    def _lead(self, views: dict[TopicPartition, View], stop: bool) -> Orders:
        """On rank 0: the leader's orders. Pauses here while idle: the other ranks wait for the answer."""
        assert self.leader is not None
        busy = self.checkpointer is not None and self.checkpointer.busy
        if stop:
            return Orders(stop=True)
        if self.leader.gate is not None and self.checkpointer is not None:
            head = self.checkpointer.head
            step, manifest = (head.step, head.manifest) if head and not busy else (self.step, None)
            if (head or busy) and (waiting := self.leader.gate.waits_for(step, manifest)):
                time.sleep(IDLE_SECONDS)
                return Orders(waiting=waiting)
        orders = self.leader.turn(views, left=len(self._entries), offsets=self.offsets, checkpointer_busy=busy)
        idle = not (self._entries or orders.entries or orders.drained or orders.finished)
        if idle:
            if self.checkpointer is not None and self.checkpointer.due(self.step):
                orders.checkpoint = True
            time.sleep(IDLE_SECONDS)
        return orders

    def _advance(self, orders: Orders) -> None:
        for partition, offset in orders.advance.items():
            self.offsets[partition] = max(self.offsets.get(partition, 0), offset)
        if orders.checkpoint:
            self._checkpoint()
        if orders.drained:
            self.drained = orders.drained
            self.report("drained", {"step": self.step, "drain": orders.drained})

    def _train(self, logged: Logged) -> frozenset[Flag]:
        began = time.monotonic()
        entry = logged.entry
        if entry.step != self.step + 1:
            raise Damaged(f"step {entry.step} was handed out after step {self.step}", topic=self.trainer.plan_topic)
        step_slices = slices(entry)
        self.progress.sign(Phase.SLICES, entry.step)
        self._reach("rank.before_slices", entry.step)
        self.accumulator.begin(len(step_slices))
        for index in range(len(step_slices)):
            if (entry.step, index) in self.exchange.inbox:
                self._slice(entry.step, index)
                self.progress.sign(Phase.SLICES, entry.step)
        self._raise_flags(entry)
        self.progress.sign(Phase.REDUCE, entry.step)
        self._reach("rank.before_reduce", entry.step)
        self.communicator.all_reduce(self.accumulator.flat, f"the reduction of step {entry.step}")
        reduced = self.accumulator.finish()
        self._reach("rank.after_reduce", entry.step)
        self.progress.sign(Phase.APPLY, entry.step)
        if not reduced.skipped:
            self._apply()
        self.step = entry.step
        self.plan_cursor = logged.offset + 1
        for r in entry.ranges:
            self.offsets[r.partition] = r.end
        self._reach("rank.after_apply", entry.step)
        self._count(entry, reduced, time.monotonic() - began)
        return reduced.flags

    def _slice(self, step: int, index: int) -> None:
        part, fetched = self.exchange.inbox.pop((step, index))
        sequences, batch = open_slice(part, fetched, self.trainer)
        for offset, sequence in zip(fetched.offsets.tolist(), sequences, strict=True):
            self._lineage.add(part.partition, offset, step, sequence.conversations)
        batch = batch.to(self.device)
        # Randomness of a slice (dropout) is a function of the step and the slice, not of the rank that trains it.
        _seed(self.device, _slice_seed(self.seed, step, index))
        loss, tokens = self.trainer.loss(self.model, batch)
        loss.backward()
        self.accumulator.slice_done(tokens, loss.item(), sum(len(s.tokens) for s in sequences))

    def _raise_flags(self, entry: PlanEntry) -> None:
        if self.stopping():
            self.accumulator.raise_flag(Flag.STOP)
        if self.leader is None:
            return
        left = len(self._entries)
        if left <= AHEAD // 4 and (not left or time.monotonic() - self._exchanged_at > EXCHANGE_SECONDS):
            self.accumulator.raise_flag(Flag.EXCHANGE)
        if self.checkpointer is not None and self.checkpointer.due(entry.step):
            self.accumulator.raise_flag(Flag.CHECKPOINT)

    def _apply(self) -> None:
        if self.trainer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.accumulator.parameters, self.trainer.clip_norm, foreach=True)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _count(self, entry: PlanEntry, reduced: Reduced, seconds: float) -> None:
        t = self.totals
        t.records += entry.records
        t.seen_tokens += reduced.seen_tokens
        self.times.steps += seconds
        self.times.seen_tokens += reduced.seen_tokens
        if reduced.skipped:
            t.skipped_steps += 1
            log.warning(
                "step %d changes nothing: %s",
                entry.step,
                f"{reduced.marks} slices were not finite" if reduced.marks else "none of its tokens is trained",
            )
        else:
            t.tokens += reduced.tokens
            t.last_loss = reduced.loss / reduced.tokens
            t.first_loss = t.last_loss if t.first_loss is None else t.first_loss
            t.loss_sum += reduced.loss
            t.loss_tokens += reduced.tokens
        if self.leader is not None:
            if not reduced.skipped:
                self._steps.append((entry.step, t.last_loss, reduced.seen_tokens, round(seconds, 4)))
            self.report(
                "step",
                {
                    "job": self.trainer.name,
                    "step": entry.step,
                    "loss": t.last_loss,
                    "first_loss": t.first_loss,
                    "records": t.records,
                    "tokens": t.tokens,
                    "seen_tokens": t.seen_tokens,
                    "step_seconds": round(seconds, 4),
                    "tokens_per_second": round(self.times.seen_tokens / (self.times.steps + self.times.data_wait)),
                    "world_size": self.communicator.world_size,
                    "data_wait": round(self.times.data_wait_share, 5),
                    "skipped_steps": t.skipped_steps,
                    "offsets": self._offsets_json(),
                },
            )

    def _checkpoint(self, *, last: bool = False) -> None:
        """Ranks give rank 0 their lineage; rank 0 copies the state and lets it be saved in the background."""
        phase = Phase.STOPPING if last else Phase.CHECKPOINT
        self.progress.sign(phase, self.step)
        checkpointer = self.checkpointer
        if (self.step, self.offsets) != self._saved:
            compare_weights(self.communicator, self.model, self.step)
            gathered = self.communicator.gather_bytes(self._lineage.take(), "gathering the lineage")
            self._saved = self.step, dict(self.offsets)
            self._gated = self.gated
            if checkpointer is not None:
                if last:
                    self._wait_for_save(checkpointer)
                self._save(checkpointer, from_bytes(gathered))
        if last and checkpointer is not None:
            self._wait_for_save(checkpointer)

    def _wait_for_save(self, checkpointer: Checkpointer) -> None:
        while True:
            try:
                checkpointer.finish(1.0)
                break
            except TimeoutError:
                self.progress.again()
        self._report_saved(checkpointer)

    def _report_saved(self, checkpointer: Checkpointer) -> None:
        done = checkpointer.last
        if done is not None:
            checkpointer.last = None
            self.report(
                "checkpoint",
                {
                    "step": done.head.step,
                    "manifest": done.head.manifest,
                    "weights_sha256": done.weights_sha256,
                    "uploaded_bytes": done.uploaded_bytes,
                    "save_seconds": round(done.seconds, 3),
                    "checkpoints": checkpointer.saved,
                    "checkpoints_skipped": checkpointer.skipped,
                },
            )

    def _save(self, checkpointer: Checkpointer, lineage: pa.Table) -> None:
        self._report_saved(checkpointer)
        self._reach("rank.before_snapshot", self.step)
        began = time.monotonic()
        t = self.totals
        loss = t.loss_sum / t.loss_tokens if t.loss_tokens else t.last_loss
        t.loss_sum, t.loss_tokens = 0.0, 0
        tensors = self._buffer.copy(state_tensors(self.model, self.optimizer, self.trainer.trainable))
        steps, self._steps = self._steps, []
        state = {
            "step": self.step,
            "offsets": self._offsets_json(),
            "plan_cursor": self.plan_cursor,
            "generation": self.communicator.generation,
            "world_size": self.communicator.world_size,
            "rng": {"seed": self.seed, "rule": "each slice is seeded from seed, step and its index"},
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "optimizer_groups": groups_json(self.optimizer),
            "optimizer_scalars": scalars_json(self.model, self.optimizer),
            "scaler": None,
            "totals": {name: getattr(t, name) for name in t.__slots__},
            "loss": loss,
            "steps": steps,
        }
        said = announcement(self.trainer.name, state, int(self.clock.now() * 1000))
        checkpointer.begin(self.step, tensors, orjson.loads(orjson.dumps(state)), lineage, said)
        self.times.snapshots += time.monotonic() - began

    def _offsets_json(self) -> dict[str, int]:
        return {f"{p.topic}/{p.partition}": offset for p, offset in sorted(self.offsets.items())}


def announcement(job: str, state: Mapping[str, Any], at_ms: int) -> dict[str, Any]:
    """What `checkpoints` says of a checkpoint, less its manifest."""
    return {
        "job": job,
        "step": state["step"],
        "offsets": state["offsets"],
        "records": state["totals"]["records"],
        "tokens": state["totals"]["tokens"],
        "loss": state["loss"],
        "at_ms": at_ms,
    }


def _seed(device: torch.device, seed: int) -> None:
    """Seeds the generator of the device. `torch.manual_seed` seeds those of every kind there is: 590 us a call."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":  # never run on a GPU
        torch.cuda.manual_seed(seed)


def _slice_seed(seed: int, step: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()) >> 1
