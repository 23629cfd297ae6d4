"""Whether the ranks of a group are alike: what changes bits is compared once, when the group forms.

Each rank that differs would train other weights, found out only at the first checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson
import torch
from torch import nn
from torch.optim import Optimizer

from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.errors import SettingError
from megaflow_stream.training.snapshot import groups_json


class RanksDiffer(SettingError):
    """The ranks of a group would not compute the same: nothing was trained."""


def describe(trainer: Trainer, model: nn.Module, optimizer: Optimizer, schedule: Any) -> dict[str, str]:
    """What must be the same on every rank, by what to call it."""
    return {
        "torch build": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "instruction set": str(torch.backends.cpu.get_cpu_capability()),
        "threads": str(torch.get_num_threads()),
        "device": next(iter(model.parameters())).device.type,
        "parameters": _json([[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()]),
        "optimizer": _json([type(optimizer).__qualname__, groups_json(optimizer)]),
        "schedule": type(schedule).__qualname__,
        "slice": _json(
            [trainer.micro_slice, trainer.block_tokens, trainer.quantum_bits, trainer.clip_norm, trainer.seed]
        ),
    }


def compare(communicator: Communicator, mine: Mapping[str, str]) -> None:
    """Raises `RanksDiffer`, on every rank alike, where one is not like rank 0."""
    digests = communicator.all_gather_integers([_digest(text) for text in mine.values()], "comparing the ranks")
    for rank, theirs in enumerate(digests):
        for name, ours, other in zip(mine, digests[0], theirs, strict=True):
            if ours != other:
                text = mine[name] if len(mine[name]) < 200 else f"{mine[name][:200]}..."
                raise RanksDiffer(
                    f"rank {rank} and rank 0 differ in {name}; here it is {text}",
                    hint="all ranks must run the same build, definition and threads on the same kind of machine",
                    rank=communicator.rank,
                )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def _json(value: object) -> str:
    return orjson.dumps(value, default=str).decode()
