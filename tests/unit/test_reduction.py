"""The integer reduction: equal bits however the slices are shared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megaflow_stream.elastic.reduction import BitAccumulator, Flag, Reduced

torch.set_num_threads(1)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 1))


def samples(slices: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 5, generator=g), torch.randn(4, 1, generator=g)) for _ in range(slices)]


def step(groups: list[list[int]], bad: int | None = None) -> tuple[Reduced, list[Tensor | None]]:
    """One step whose slices were shared so: one accumulator a rank, their sums added as a reduction adds them."""
    data = samples(sum(len(g) for g in groups))
    total, last = None, None
    for group in groups:
        model = net()
        accumulator = BitAccumulator(model.parameters())
        accumulator.begin(len(data))
        for i in group:
            x, y = data[i]
            loss = ((model(x) - y) ** 2).sum()
            if i == bad:
                loss = loss * float("nan")
            loss.backward()
            accumulator.slice_done(4, loss.item())
        total = accumulator.flat.clone() if total is None else total + accumulator.flat
        last = accumulator
    assert last is not None
    assert total is not None
    last.flat.copy_(total)
    return last.finish(), [p.grad for p in last.parameters]


def test_any_sharing_gives_the_same_bits() -> None:
    expected = step([[0, 1, 2, 3, 4, 5]])
    for groups in (
        [[0, 1, 2], [3, 4, 5]],
        [[5, 0], [4, 1], [3, 2]],
        [[], [5, 4, 3, 2, 1, 0]],
        [[0], [], [1, 2, 3, 4, 5]],
    ):
        reduced, gradients = step(groups)
        assert reduced == expected[0]
        for a, b in zip(gradients, expected[1], strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)


def test_the_gradient_is_the_mean_over_tokens() -> None:
    reduced, gradients = step([[0, 1], [2]])
    model = net()
    total = torch.stack([((model(x) - y) ** 2).sum() for x, y in samples(3)]).sum()
    total.backward()
    assert (reduced.tokens, reduced.marks, reduced.skipped) == (12, 0, False)
    assert reduced.loss == pytest.approx(total.item(), abs=1e-4)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(gradient, p.grad / 12, atol=1e-7, rtol=1e-5)


def test_a_slice_that_is_not_finite_is_skipped_by_all() -> None:
    reduced, gradients = step([[0, 1], [2]], bad=1)
    assert (reduced.marks, reduced.skipped) == (1, True)
    assert gradients == [None] * 4


def test_a_gradient_out_of_range_is_marked() -> None:
    p = nn.Parameter(torch.ones(3))
    accumulator = BitAccumulator([p])
    accumulator.begin(2)
    (p * 2.0**29).sum().backward()
    accumulator.slice_done(1, 1.0)
    assert accumulator.finish().marks == 1
    accumulator.begin(2)
    (p * 2.0**28).sum().backward()
    accumulator.slice_done(1, 1.0)
    assert accumulator.finish().marks == 0


def test_a_step_without_trained_tokens_is_skipped() -> None:
    p = nn.Parameter(torch.ones(3))
    accumulator = BitAccumulator([p])
    accumulator.begin(1)
    (p * 0.0).sum().backward()
    accumulator.slice_done(0, 0.0)
    assert accumulator.finish() == Reduced(0, 0, 0, 0.0, frozenset())
    assert p.grad is None


def test_flags_ride_along() -> None:
    accumulator = BitAccumulator([nn.Parameter(torch.ones(3))])
    accumulator.begin(0)
    accumulator.raise_flag(Flag.STOP)
    accumulator.raise_flag(Flag.CHECKPOINT)
    assert accumulator.finish().flags == {Flag.STOP, Flag.CHECKPOINT}
    accumulator.begin(0)
    assert accumulator.finish().flags == set()
    with pytest.raises(ValueError, match="nothing to train"):
        BitAccumulator([nn.Parameter(torch.ones(1), requires_grad=False)])
