"""Puts a checkpoint's weights into a model. The optimizer's state is not even read.

    from megaflow_stream.evaluation import load_into
    loaded = await load_into(model, store, "model_finetune", "best")

or, from a program without an event loop of its own, `asyncio.run(...)` around it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megaflow_stream import checkpoint
from megaflow_stream.checkpoint import MODEL, Loaded, TensorSpec
from megaflow_stream.errors import MegaflowError
from megaflow_stream.storage.api import ObjectStore


class DoesNotFit(MegaflowError):
    """A checkpoint has other tensors than the model: names, shapes or dtypes differ."""


async def load_into(model: nn.Module, store: ObjectStore, job: str, which: str | int | None = None) -> Loaded:
    """Loads the weights of a checkpoint (head, key, step or alias; see `checkpoint.resolve`) into `model`, in place.

    Returns the checkpoint, whose `manifest` says step, offsets and definition. Raises `NotFound`, `Damaged`, and
    `DoesNotFit` before anything of the model was changed."""
    loaded = await checkpoint.load(store, job, which, kinds=MODEL)
    put_into(model, loaded.tensors)
    return loaded


def put_into(model: nn.Module, tensors: Iterable[tuple[TensorSpec, memoryview]]) -> None:
    """Copies tensors into the parameters and buffers of their names; a tied parameter is given under any of its names.

    Raises `DoesNotFit` unless they are exactly the model's, dtype and shape included."""
    places = _places(model)
    given = {spec.name: (spec, view) for spec, view in tensors}
    filled: set[int] = set()
    for name, (spec, _) in given.items():
        target = places.get(name)
        if target is None:
            raise DoesNotFit("the model has no such tensor", tensor=name)
        dtype = str(target.dtype).removeprefix("torch.")
        if (dtype, tuple(target.shape)) != (spec.dtype, spec.shape):
            raise DoesNotFit(
                f"the model has {dtype} {list(target.shape)}, the checkpoint {spec.dtype} {list(spec.shape)}",
                hint="the trainer's build_model makes another model than the one that was trained",
                tensor=name,
            )
        filled.add(id(target))
    missing = [name for name, target in places.items() if id(target) not in filled]
    if missing:
        raise DoesNotFit(
            f"the checkpoint lacks {len(missing)} tensors of the model",
            hint="the trainer's build_model makes another model than the one that was trained",
            tensor=missing[0],
        )
    with torch.no_grad():
        for name, (spec, view) in given.items():
            if view.nbytes:
                places[name].copy_(torch.frombuffer(view, dtype=getattr(torch, spec.dtype)).view(spec.shape))


def _places(model: nn.Module) -> dict[str, Tensor]:
    """Every name of a parameter or persistent buffer, tied ones under each of their names -> the tensor itself."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
