"""A copy of the training state in one reusable buffer: all that a checkpoint costs the training thread.

Names: a parameter's or buffer's own; of optimizer state `optimizer/PARAMETER/STATE`, by name, never by index.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megaflow_stream.checkpoint import Kind, TensorSpec
from megaflow_stream.errors import Damaged, MegaflowError

_ALIGN = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def state_tensors(
    model: nn.Module, optimizer: Optimizer, trainable: Callable[[str], bool]
) -> Iterator[tuple[str, Kind, Tensor]]:
    """Every tensor of the state, with its name and kind, in a fixed order. A tied parameter comes once."""
    named = dict(model.named_parameters())
    for name, tensor in _model_tensors(model):
        yield name, "trainable" if name in named and trainable(name) else "frozen", tensor
    for name, parameter in named.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"optimizer/{name}/{key}", "optimizer", value


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then persistent buffers, detached."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield name, buffer.detach()


class SnapshotBuffer:
    """Holds one snapshot. `copy` overwrites it: not before whoever reads the last one is done."""

    def __init__(self) -> None:
        self._layout: list[tuple[str, Kind, torch.dtype, torch.Size]] = []
        self._places: list[Tensor] = []
        self._views: list[tuple[TensorSpec, memoryview]] = []

    @torch.no_grad()
    def copy(self, tensors: Iterable[tuple[str, Kind, Tensor]]) -> list[tuple[TensorSpec, memoryview]]:
        """Copies them in; the views are of this buffer. It is allocated anew only when the tensors' shapes change."""
        found = list(tensors)
        layout = [(name, kind, t.dtype, t.shape) for name, kind, t in found]
        if layout != self._layout:
            self._allocate(layout)
        for place, (_, _, tensor) in zip(self._places, found, strict=True):
            place.copy_(tensor, non_blocking=True)
        if any(t.is_cuda for _, _, t in found):
            torch.cuda.synchronize()
        return list(self._views)

    def _allocate(self, layout: list[tuple[str, Kind, torch.dtype, torch.Size]]) -> None:
        """Makes the buffer, and the places in it: to make those at each copy takes a fifth of the copy's time."""
        self._layout, self._places, self._views = layout, [], []
        specs = [
            TensorSpec(n, str(dtype).removeprefix("torch."), tuple(shape), kind) for n, kind, dtype, shape in layout
        ]
        begins = [0, *accumulate(-(-spec.size_bytes // _ALIGN) * _ALIGN for spec in specs)]
        buffer = torch.empty(begins.pop(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        whole = memoryview(buffer.numpy())  # type: ignore[arg-type]
        for spec, begin, (_, _, dtype, shape) in zip(specs, begins, layout, strict=True):
            end = begin + spec.size_bytes
            self._places.append(buffer[begin:end].view(dtype).view(shape))
            self._views.append((spec, whole[begin:end]))


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


def scalars_json(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state that is no tensor (a Python step count, a flag), by parameter name.

    Raises `MegaflowError` for what JSON does not hold exactly: a checkpoint without it would train differently."""
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) or value is None:
                continue
            if not isinstance(value, (bool, int, float, str)) or value in (math.inf, -math.inf) or value != value:
                raise MegaflowError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} under {key!r}: no checkpoint holds it",
                    hint="a resumed optimizer needs its whole state: tensors, numbers, strings",
                    parameter=name,
                )
            found.setdefault(name, {})[key] = value
    return found


def put_back_scalars(model: nn.Module, optimizer: Optimizer, scalars: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts `scalars_json` back; a parameter that is not there any more has been refused with its tensors."""
    parameters = dict(model.named_parameters())
    for name, values in scalars.items():
        optimizer.state[parameters[name]].update(values)


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


def integer_digests(model: nn.Module) -> dict[str, int]:
    """Of each parameter and persistent buffer the sum of its bits as integers, modulo 2**64: cheap, to see that ranks
    still agree.

    Words of 64 bits where a tensor has whole ones: half the elements, none of them widened."""
    found = {}
    for name, tensor in _model_tensors(model):
        data = tensor.reshape(-1)
        whole = not data.nbytes % 8 and not data.storage_offset() * data.element_size() % 8
        found[name] = int(data.view(torch.int64 if whole else _INTEGERS[data.element_size()]).sum(dtype=torch.int64))
    return found


def integer_digest(model: nn.Module) -> int:
    """The sum of `integer_digests`, modulo 2**64, as a signed number."""
    return (sum(integer_digests(model).values()) + 2**63) % 2**64 - 2**63
