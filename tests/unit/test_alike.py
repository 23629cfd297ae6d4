"""Ranks that would not compute the same are refused when their group forms."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.training.alike import RanksDiffer, compare, describe
from megaflow_stream.training.optimizers import BuildAdamW


def description(learning_rate: float = 1e-3, micro_slice: int = 4) -> dict[str, str]:
    model = torch.nn.Linear(3, 2)
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
    return describe(trainer, model, optimizer, None)


def compared(*ranks: dict[str, str]) -> list[str]:
    """What each rank raises."""
    store = HashStore()

    def one(rank: int) -> str:
        communicator = Communicator(store, generation=1, rank=rank, world_size=len(ranks), timeout_seconds=20)
        try:
            compare(communicator, ranks[rank])
        except RanksDiffer as error:
            return f"{error}; exit code {error.exit_code}"
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def test_ranks_that_are_alike_go_on() -> None:
    assert compared(description(), description(), description()) == ["", "", ""]


@pytest.mark.parametrize(
    ("differing", "name"),
    [
        (lambda: description(learning_rate=2e-3), "optimizer"),
        (lambda: description(micro_slice=2), "slice"),
        (lambda: {**description(), "threads": "64"}, "threads"),
        (lambda: {**description(), "torch build": "2.0"}, "torch build"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(differing: Callable[[], dict[str, str]], name: str) -> None:
    other = differing()
    said = compared(description(), other)
    assert all(f"rank 1 and rank 0 differ in {name}" in text and text.endswith("exit code 2") for text in said)
    assert other[name][:20] in said[1]
