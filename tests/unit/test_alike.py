"""Ranks that would not compute the same are refused when their group forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.errors import MegaflowError
from megaflow_stream.training.alike import compare, compare_weights, describe
from megaflow_stream.training.optimizers import BuildAdamW
from megaflow_stream.training.snapshot import integer_digest
from tests.unit.rank_threads import on_ranks


def description(
    learning_rate: float = 1e-3, micro_slice: int = 4, model: torch.nn.Module | None = None, definition: str = "one"
) -> dict[str, str]:
    model = model or torch.nn.Linear(3, 2)
    trainer = Trainer(
        name="t",
        data="d",
        validation="v",
        tokenizer="t",
        build_model=lambda: model,
        loss=lambda m, b: (None, 0),
        build_optimizer=lambda p: None,
        micro_slice=micro_slice,
    )
    optimizer = BuildAdamW(learning_rate=learning_rate)(model.named_parameters())
    return describe(trainer, model, optimizer, None, definition)


def with_math_attention() -> dict[str, str]:
    with sdpa_kernel(SDPBackend.MATH):
        return description()


def with_autocast() -> dict[str, str]:
    with torch.autocast("cpu", torch.bfloat16):
        return description()


def with_other_matmul() -> dict[str, str]:
    torch.set_float32_matmul_precision("high")
    try:
        return description()
    finally:
        torch.set_float32_matmul_precision("highest")


def with_compiled() -> dict[str, str]:
    model = torch.nn.Linear(3, 2)
    model.compile(backend="eager")
    return description(model=model)


def compared(*ranks: dict[str, str]) -> list[str]:
    """What each rank raises."""
    return on_each(len(ranks), lambda communicator: compare(communicator, ranks[communicator.rank]))


def on_each(count: int, work: Callable[[Communicator], None]) -> list[str]:
    """What each rank raises."""

    def one(communicator: Communicator) -> str:
        try:
            work(communicator)
        except MegaflowError as error:
            return f"{error}; exit code {error.exit_code}"
        return ""

    return on_ranks(count, one)


class Normed(torch.nn.Module):
    """A parameter, running statistics, and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("cache", torch.zeros(5), persistent=False)


def test_running_statistics_that_differ_are_refused_by_name() -> None:
    models = [Normed() for _ in range(3)]
    assert on_each(3, lambda c: compare_weights(c, models[c.rank], 5)) == ["", "", ""]
    models[1].cache.fill_(1.0)
    assert on_each(3, lambda c: compare_weights(c, models[c.rank], 5)) == ["", "", ""]
    models[1].norm(torch.arange(6.0).view(2, 3))
    assert integer_digest(models[1]) != integer_digest(models[0])
    said = on_each(3, lambda c: compare_weights(c, models[c.rank], 5))
    assert said == ["the ranks' buffers differ at step 5: nothing is saved (tensor norm.running_mean); exit code 1"] * 3
    with torch.no_grad():
        models[2].norm.weight[0] = 2.0
    said = on_each(3, lambda c: compare_weights(c, models[c.rank], 6))
    assert said == ["the ranks' weights differ at step 6: nothing is saved (tensor norm.weight); exit code 1"] * 3


def test_ranks_that_are_alike_go_on() -> None:
    assert compared(description(), description(), description()) == ["", "", ""]


@pytest.mark.parametrize(
    ("differing", "name"),
    [
        (lambda: description(learning_rate=2e-3), "optimizer"),
        (lambda: description(micro_slice=2), "slice"),
        (lambda: description(definition="another"), "definition"),
        (with_math_attention, "attention kernels"),
        (with_autocast, "autocast"),
        (with_other_matmul, "arithmetic"),
        (with_compiled, "compiled modules"),
        (lambda: {**description(), "threads": "64"}, "threads"),
        (lambda: {**description(), "torch build": "2.0"}, "torch build"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(differing: Callable[[], dict[str, str]], name: str) -> None:
    other = differing()
    said = compared(description(), other)
    assert all(f"rank 1 and rank 0 differ in {name}" in text and text.endswith("exit code 2") for text in said)
    assert other[name][:20] in said[1]
