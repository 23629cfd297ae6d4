"""Optimizers and schedules for definitions to name.

An implementation is fixed, never left to torch's defaults: foreach, fused and single-tensor AdamW may differ in bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildAdamW:
    """AdamW (arXiv:1711.05101); matrices decay, vectors (norms, biases) do not."""

    learning_rate: float
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8

    def __call__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        named = list(parameters)
        groups = [
            {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ]
        return AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.epsilon,
            foreach=True,
            fused=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupConstant:
    """The rate rises linearly over `warmup_steps`, then stays: for a stream that has no end."""

    warmup_steps: int = 10

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / max(1, self.warmup_steps))

    def __call__(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, _function(self.factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosine:
    """The rate rises linearly over `warmup_steps`, then falls to `floor` of itself by half a cosine (arXiv:1608.03983)
    until `steps`, and stays there."""

    steps: int
    warmup_steps: int = 10
    floor: float = 0.1

    def factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2

    def __call__(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, _function(self.factor))


def _function(factor: Callable[[int], float]) -> Callable[[int], float]:
    """A plain function: the state of a LambdaLR then holds its counters only, and is JSON."""
    return lambda step: factor(step)
