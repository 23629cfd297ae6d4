"""A copy of the training state in one reusable buffer: all that a checkpoint costs the training thread.

Names: a parameter's or buffer's own; of optimizer state `optimizer/PARAMETER/STATE`, by name, never by index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megaflow_stream.checkpoint import Kind, TensorSpec
from megaflow_stream.errors import Damaged

_ALIGN = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def state_tensors(
    model: nn.Module, optimizer: Optimizer, trainable: Callable[[str], bool]
) -> Iterator[tuple[str, Kind, Tensor]]:
    """Every tensor of the state, with its name and kind, in a fixed order. A tied parameter comes once."""
    named = list(model.named_parameters())
    for name, parameter in named:
        yield name, "trainable" if trainable(name) else "frozen", parameter.detach()
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield name, "frozen", buffer
    for name, parameter in named:
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"optimizer/{name}/{key}", "optimizer", value


class SnapshotBuffer:
    """Holds one snapshot. `copy` overwrites it: not before whoever reads the last one is done."""

    def __init__(self) -> None:
        self._layout: list[tuple[TensorSpec, int]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, tensors: Iterable[tuple[str, Kind, Tensor]]) -> list[tuple[TensorSpec, memoryview]]:
        """Copies them in; the views are of this buffer. It is allocated anew only when the tensors' shapes change."""
        found = list(tensors)
        specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape), kind) for n, kind, t in found]
        if specs != [spec for spec, _ in self._layout]:
            self._allocate(specs)
        whole = memoryview(self._buffer.numpy())  # type: ignore[arg-type]
        views = []
        for (_, _, tensor), (spec, begin) in zip(found, self._layout, strict=True):
            end = begin + spec.size_bytes
            if spec.size_bytes:
                self._buffer[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            views.append((spec, whole[begin:end]))
        if any(t.is_cuda for _, _, t in found):
            torch.cuda.synchronize()
        return views

    def _allocate(self, specs: Sequence[TensorSpec]) -> None:
        self._layout, at = [], 0
        for spec in specs:
            self._layout.append((spec, at))
            at += -(-spec.size_bytes // _ALIGN) * _ALIGN
        self._buffer = torch.empty(at, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._buffer.zero_()  # the pages are there before the first copy is timed


@torch.no_grad()
def put_back(
    tensors: Sequence[tuple[TensorSpec, memoryview]],
    model: nn.Module,
    optimizer: Optimizer,
    trainable: Callable[[str], bool],
) -> None:
    """Loads a snapshot's tensors. Raises `Damaged` when model and checkpoint have other tensors or shapes."""
    parameters = dict(model.named_parameters())
    target = {name: t for name, kind, t in state_tensors(model, optimizer, trainable) if kind != "optimizer"}
    given = {spec.name for spec, _ in tensors if spec.kind != "optimizer"}
    if given != set(target):
        lacking, extra = sorted(set(target) - given)[:3], sorted(given - set(target))[:3]
        raise Damaged(
            f"the checkpoint is not of this model: it lacks {lacking}, and has {extra} beyond it",
            hint="was the trainer's build_model changed? Then start the job under a new name",
        )
    for spec, view in tensors:
        value = torch.frombuffer(view if len(view) else bytearray(1), dtype=torch.uint8)[: spec.size_bytes]
        value = value.view(getattr(torch, spec.dtype)).view(spec.shape)
        if spec.kind == "optimizer":
            name, _, key = spec.name.removeprefix("optimizer/").rpartition("/")
            # AdamW keeps its step on the CPU, all else with the parameter.
            device = "cpu" if not spec.shape else parameters[name].device
            optimizer.state[parameters[name]][key] = value.clone().to(device)
            continue
        if target[spec.name].shape != value.shape:
            raise Damaged(
                f"{spec.name} has the shape {list(value.shape)} in the checkpoint and "
                f"{list(target[spec.name].shape)} in the model"
            )
        target[spec.name].copy_(value)


def groups_json(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's parameter groups without their parameters: rates, betas, decay."""
    return [
        {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def put_back_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})


def weights_sha256(tensors: Iterable[tuple[TensorSpec, memoryview]]) -> str:
    """Names the weights: SHA-256 over the model's tensors, names and bytes, in the model's order."""
    digest = hashlib.sha256()
    for spec, view in tensors:
        if spec.kind != "optimizer":
            digest.update(spec.name.encode())
            digest.update(view)
    return digest.hexdigest()


def integer_digest(model: nn.Module) -> int:
    """The sum of the weights' bits as integers, modulo 2**64: cheap, to see that ranks still agree."""
    total = 0
    for parameter in model.parameters():
        data = parameter.detach()
        bits = data.view(
            torch.int32 if data.element_size() == 4 else torch.int16 if data.element_size() == 2 else torch.int64
        )
        total += int(bits.sum(dtype=torch.int64))
    return (total + 2**63) % 2**64 - 2**63
