"""Times what a checkpoint keeps the training thread, for `checkpoint.py`: runs within the rank."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.training import alike
from megaflow_stream.training.loop import Rank
from megaflow_stream.training.rank import emit
from megaflow_stream.training.snapshot import state_tensors


class Plain:
    """A buffer for a plain copy of the state, there before it is timed."""

    def __init__(self, rank: Rank) -> None:
        self.sources = [t for _, _, t in state_tensors(rank.model, rank.optimizer, rank.trainer.trainable)]
        self.targets = [torch.zeros_like(t) for t in self.sources]
        self.bytes = sum(t.nbytes for t in self.sources)

    @torch.no_grad()
    def copy(self) -> float:
        began = time.perf_counter()
        for target, source in zip(self.targets, self.sources, strict=True):
            target.copy_(source)
        return time.perf_counter() - began


def thread_times() -> dict[str, float]:
    """Of the training thread, so far, in seconds: on a CPU, and ready but waiting for one (Linux's schedstat)."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return {"cpu_seconds": int(ran) / 1e9, "queue_seconds": int(waited) / 1e9}


def measure_stalls() -> None:
    """Wraps the rank's checkpoints; nothing where the launcher loads the definition."""
    if Path(sys.argv[0]).name != "rank.py":
        return
    plain: Plain | None = None
    times = {"digest_seconds": 0.0, "gather_seconds": 0.0}
    checkpoint, count = Rank._checkpoint, Rank._count
    digest, gather = alike.integer_digest, Communicator.gather_bytes

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                times[name] = time.perf_counter() - began

        return call

    def measured(self: Rank, *, last: bool = False) -> None:
        if last or plain is None:
            checkpoint(self, last=last)
            return
        before = psutil.Process().memory_info().rss
        seconds = plain.copy()
        snapshots, began = self.times.snapshots, time.perf_counter()
        checkpoint(self)
        stall = time.perf_counter() - began
        emit(
            "stall",
            {
                "step": self.step,
                "plain_seconds": seconds,
                "stall_seconds": stall,
                "snapshot_seconds": self.times.snapshots - snapshots,
                "state_bytes": plain.bytes,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "before_bytes": before,
                **times,
            },
        )

    def counted(self: Rank, *args: Any) -> None:
        nonlocal plain
        emit("thread", {"step": self.step, **thread_times()})
        if plain is None:
            plain = Plain(self)  # after the first step the optimizer has its state
            plain.copy()
        count(self, *args)

    alike.integer_digest = timed("digest_seconds", digest)
    Communicator.gather_bytes = timed("gather_seconds", gather)  # type: ignore[method-assign]
    Rank._checkpoint = measured  # type: ignore[method-assign]
    Rank._count = counted  # type: ignore[method-assign]
