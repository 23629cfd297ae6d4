"""All of an optimizer's state survives a checkpoint, also what is no tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megaflow_stream.errors import MegaflowError
from megaflow_stream.training.snapshot import (
    SnapshotBuffer,
    put_back,
    put_back_scalars,
    scalars_json,
    state_tensors,
)


class Counting(Optimizer):
    """Counts its steps in a Python int, as many optimizers do."""

    def __init__(self, parameters: Iterable[Tensor], keep: Any = None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.keep = keep

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["average"] = torch.zeros_like(p)
                if self.keep is not None:
                    state["kept"] = self.keep
                p.data.add_(p.grad, alpha=-group["lr"] / state["step"])


def trained(optimizer: type[Counting], model: nn.Module, steps: int, made: Counting | None = None) -> Counting:
    made = made or optimizer(model.parameters())
    for _ in range(steps):
        made.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        made.step()
    return made


def test_a_python_step_count_is_resumed() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = trained(Counting, model, 3)
    tensors = SnapshotBuffer().copy(state_tensors(model, optimizer, lambda name: True))
    scalars = orjson.loads(orjson.dumps(scalars_json(model, optimizer)))
    assert scalars == {"weight": {"step": 3}, "bias": {"step": 3}}
    other = nn.Linear(3, 1)
    resumed = Counting(other.parameters())
    put_back(tensors, other, resumed, lambda name: True)
    put_back_scalars(other, resumed, scalars)
    trained(Counting, model, 2, optimizer)
    trained(Counting, other, 2, resumed)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("kept", [[1, 2], float("inf"), float("nan"), {"a": 1}])
def test_state_that_no_checkpoint_holds_is_refused_by_name(kept: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = trained(Counting, model, 1, Counting(model.parameters(), kept))
    with pytest.raises(MegaflowError, match=r"Counting keeps a .* under 'kept'.*weight"):
        scalars_json(model, optimizer)
