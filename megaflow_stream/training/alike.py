"""Whether the ranks of a group are alike: what changes bits is compared once, when the group forms.

Each rank that differs would train other weights, found out only at the first checkpoint: there the weights themselves
are compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import orjson
import torch
from torch import nn
from torch.optim import Optimizer

from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.errors import MegaflowError, SettingError
from megaflow_stream.training.snapshot import groups_json, integer_digest, integer_digests

_COMPILE_VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


class RanksDiffer(SettingError):
    """The ranks of a group would not compute the same: nothing was trained."""


class WeightsDiffer(MegaflowError):
    """The ranks of a group have not computed the same: nothing is saved."""


def describe(
    trainer: Trainer, model: nn.Module, optimizer: Optimizer, schedule: Any, definition: str
) -> dict[str, str]:
    """What must be the same on every rank, by what to call it.

    definition: SHA-256 of the file that declares the trainer: what its code sets within the loss (autocast, a kernel of
    attention) is seen by that alone."""
    device = next(iter(model.parameters())).device.type
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "torch build": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "instruction set": str(torch.backends.cpu.get_cpu_capability()),
        "threads": str(torch.get_num_threads()),
        "device": f"{device}, {torch.cuda.get_device_name()}" if device == "cuda" else device,
        "definition": definition,
        "parameters": _json([[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()]),
        "optimizer": _json([type(optimizer).__qualname__, groups_json(optimizer)]),
        "schedule": type(schedule).__qualname__,
        "slice": _json(
            [trainer.micro_slice, trainer.block_tokens, trainer.quantum_bits, trainer.clip_norm, trainer.seed]
        ),
        "attention kernels": _json(
            {
                "flash": cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
                "memory efficient": cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
                "cudnn": cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
                "math": cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
            }
        ),
        "autocast": _json([torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))]),
        "arithmetic": _json(
            {
                "matmul": torch.get_float32_matmul_precision(),
                "default": str(torch.get_default_dtype()),
                "deterministic": [torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark],
                "mkldnn": torch.backends.mkldnn.enabled,
            }
        ),
        "compiled modules": _json([_compiled(model), {name: os.environ.get(name, "") for name in _COMPILE_VARIABLES}]),
    }


def _compiled(model: nn.Module) -> list[str]:
    """The modules that torch.compile has wrapped or that compile themselves."""
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
    ]


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


def compare_weights(communicator: Communicator, model: nn.Module, step: int) -> None:
    """Raises `WeightsDiffer`, on every rank alike, where a rank's parameters or persistent buffers are not rank 0's."""
    whole = communicator.all_gather_integers([integer_digest(model)], "comparing the ranks' weights")
    if whole.count(whole[0]) == len(whole):
        return
    mine = integer_digests(model)
    digests = communicator.all_gather_integers(list(mine.values()), "comparing the ranks' weights, one by one")
    differing = [name for name, theirs in zip(mine, zip(*digests, strict=True), strict=True) if len(set(theirs)) > 1]
    buffer = differing[0] not in dict(model.named_parameters())
    raise WeightsDiffer(
        f"the ranks' {'buffers' if buffer else 'weights'} differ at step {step}: nothing is saved",
        hint="a buffer that training changes, such as BatchNorm's running statistics, is each rank's own: build the "
        "model without it, or train with one rank"
        if buffer
        else "do all ranks run the same build, threads and optimizer implementation?",
        tensor=differing[0],
    )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def _json(value: object) -> str:
    return orjson.dumps(value, default=str).decode()
