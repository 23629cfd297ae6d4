"""Gradients summed as integers: equal bits for any number of ranks, and for any split of the slices among them.

A float sum depends on its order, so ranks that share a step differently train different weights. Here the gradient
of each micro-slice's *summed* loss is rounded once to a multiple of 2**-quantum_bits and added into int64; integers
add alike in any order. After the one reduction every rank divides by the global count of trained tokens.

Why 32 bits suffice (measured on models of 1 M and 21 M parameters): the largest |gradient| of a slice's summed loss was
65, so a step may hold 2**24 such slices before a sum could leave 63 bits, and the rounding is 400 times finer than
the error of a float32 sum at the element that suffers most.

The flat buffer ends in counters that ride along: tokens, slices marked as not finite, the loss in 2**-20,
and flags by which the ranks agree at a step's end. The same step is skipped by all when any slice was marked or when
nothing was trained. A parameter that took no part in a slice adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn

LOSS_BITS = 20
CHUNK = 65_536  # elements: a piece that stays in the cache while it is scaled, rounded and added


class Flag(IntEnum):
    """What a rank asks of all ranks at the end of a step; any rank's wish counts for all."""

    STOP = 0
    EXCHANGE = 1
    CHECKPOINT = 2


COUNTERS = 4  # trained tokens, tokens, marks, loss


@dataclass(frozen=True, slots=True)
class Reduced:
    """A step, as every rank sees it after the reduction.

    tokens: those that were trained targets; seen_tokens: all that went through the model, padding left out.
    loss: the sum over the trained tokens, in nats. skipped: no weight may change in this step.
    """

    tokens: int
    seen_tokens: int
    marks: int
    loss: float
    flags: frozenset[Flag]

    @property
    def skipped(self) -> bool:
        return bool(self.marks) or not self.tokens


class BitAccumulator:
    """int64 sums of the gradients of `parameters`, filled by hooks during each backward.

    parameters: those that are trained, all on one device. Their `grad` is freed as soon as it was added, so that no
    float gradient outlives a backward; `finish` puts the mean gradient back, float32.
    quantum_bits: k; one unit of the sum is 2**-k of a gradient of the summed loss. Part of the trainer's definition.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], quantum_bits: int = 32) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise ValueError("nothing to train: no parameter requires a gradient")
        self.quantum_bits = quantum_bits
        self.device = self.parameters[0].device
        size = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(size + COUNTERS + len(Flag), dtype=torch.int64, device=self.device)
        self.counters = self.flat[size:]
        self._sums: list[Tensor] = []
        start = 0
        for p in self.parameters:
            self._sums.append(self.flat[start : start + p.numel()])
            start += p.numel()
        self._means = [torch.empty(p.shape, device=self.device) for p in self.parameters]
        self._integers = torch.empty(CHUNK, dtype=torch.int64)
        self._doubles = torch.empty(CHUNK, dtype=torch.float64)
        self._limit = 2.0 ** (62 - quantum_bits)
        self._marked = torch.zeros((), dtype=torch.bool, device=self.device)
        for p, total in zip(self.parameters, self._sums, strict=True):
            p.register_post_accumulate_grad_hook(lambda p, total=total: self._add(p, total))  # type: ignore[no-untyped-call]

    def begin(self, slices: int) -> None:
        """Starts a step of so many slices over all ranks: the plan's count, so that every rank has the same limit.

        A gradient above 2**(62-k)/slices is marked: below it no sum in any order can leave 64 bits."""
        self.flat.zero_()
        self._marked.zero_()
        self._limit = 2.0 ** (62 - self.quantum_bits) / max(1, slices)

    @torch.no_grad()
    def _add(self, parameter: Tensor, total: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        gradient = gradient.float().reshape(-1)
        low, high = torch.aminmax(gradient)
        self._marked |= ~(torch.maximum(-low, high) < self._limit)  # nan compares false, so it is marked too
        scale = 2.0**self.quantum_bits
        if gradient.device.type != "cpu":
            total.add_(gradient.mul_(scale).round_().to(torch.int64))
            return
        for i in range(0, gradient.numel(), CHUNK):
            piece = gradient[i : i + CHUNK]
            integers = self._integers[: piece.numel()]
            integers.copy_(piece.mul_(scale).round_())
            total[i : i + CHUNK].add_(integers)

    def slice_done(self, tokens: int, loss: float, seen_tokens: int = 0) -> None:
        """Counts one slice after its backward: its trained tokens, its summed loss, its tokens."""
        finite = math.isfinite(loss)
        units = round(loss * 2**LOSS_BITS) if abs(loss) < 1e12 else 0
        self.counters[2] += self._marked & finite
        self.counters[:COUNTERS] += torch.tensor([tokens, seen_tokens, not finite, units], device=self.device)
        self._marked.zero_()

    def raise_flag(self, flag: Flag) -> None:
        self.counters[COUNTERS + flag] = 1

    @torch.no_grad()
    def finish(self) -> Reduced:
        """After the reduction: each `grad` is the mean gradient, alike on all ranks; None where the step is skipped."""
        tokens, seen, marks, loss, *flags = self.counters.tolist()
        reduced = Reduced(tokens, seen, marks, loss / 2**LOSS_BITS, frozenset(f for f in Flag if flags[f]))
        # Two roundings to 53 bits and one to 24, the same on every rank.
        factor = 0.0 if reduced.skipped else 2.0**-self.quantum_bits / tokens
        for p, total, mean in zip(self.parameters, self._sums, self._means, strict=True):
            if reduced.skipped:
                p.grad = None
                continue
            out = mean.view(-1)
            if self.device.type != "cpu":
                out.copy_(total.to(torch.float64).mul_(factor))
            else:
                for i in range(0, total.numel(), CHUNK):
                    piece = total[i : i + CHUNK]
                    doubles = self._doubles[: piece.numel()]
                    doubles.copy_(piece)
                    out[i : i + CHUNK].copy_(doubles.mul_(factor))
            p.grad = mean.to(p.dtype)
        return reduced
