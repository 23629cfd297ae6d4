"""A group of ranks as threads of the test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore

from megaflow_stream.elastic.communicator import Communicator

T = TypeVar("T")


def on_ranks(count: int, work: Callable[[Communicator], T]) -> list[T]:
    """What the work gives on each rank."""
    store = HashStore()

    def one(rank: int) -> T:
        return work(Communicator(store, generation=1, rank=rank, world_size=count, timeout_seconds=20))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
