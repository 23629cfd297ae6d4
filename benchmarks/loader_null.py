"""The trainer that does nothing, for `loader.py`: runs within the ranks."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaflow_stream.definitions.trainer import CheckpointEvery, Trainer
from megaflow_stream.training.loop import Rank


class Null(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def loss(model: Null, batch: Any) -> tuple[Tensor, int]:
    return model.weight.sum(), batch.tokens.numel()


class Nothing(torch.optim.Optimizer):
    """Steps, and changes nothing."""

    def step(self, closure: Any = None) -> None:
        return None


def hand_over(rank: Rank, step: int, index: int) -> None:
    """In place of `Rank._slice`: the records are in hand, and that is all. A step's first slice counts for all."""
    _, fetched = rank.exchange.inbox.pop((step, index))
    if step != getattr(rank, "handed_over", None):
        rank.handed_over = step  # type: ignore[attr-defined]
        rank.accumulator.slice_done(int(fetched.trainable_tokens.sum()), 0.0)


def count_received(folder: str) -> None:
    """Counts what this process's Python sockets receive, in a file of the folder: of Kafka and S3, not of gloo."""
    path = Path(folder, str(os.getpid()))
    path.write_bytes(struct.pack("<q", 0))
    with path.open("r+b") as file:
        counter = mmap.mmap(file.fileno(), 8)
    total = 0
    receive = socket.socket.recv

    def counted(self: socket.socket, *args: int) -> bytes:
        nonlocal total
        data = receive(self, *args)
        total += len(data)
        struct.pack_into("<q", counter, 0, total)
        return data

    socket.socket.recv = counted  # type: ignore[method-assign]


def null_trainer(name: str, data: str, *, batches: bool, tokens: int, global_batch: int) -> Trainer:
    """batches: every record is decoded and put into a micro-batch before it is forgotten."""
    if is_rank():
        count_received(os.environ["BENCH_WIRE"])
        if not batches:
            Rank._slice = hand_over  # type: ignore[method-assign]
    return Trainer(
        name=name,
        data=data,
        validation=f"{data}.validation",
        tokenizer="tokenizer.json",
        build_model=Null,
        build_optimizer=lambda named: Nothing([p for _, p in named], {}),
        loss=loss,
        block_tokens=tokens,
        micro_slice=8,
        global_batch=global_batch,
        clip_norm=None,
        checkpoint=CheckpointEvery(steps=10**9),
    )


def is_rank() -> bool:
    """The launcher's process loads the definition too."""
    return Path(sys.argv[0]).name == "rank.py"
