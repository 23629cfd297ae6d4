"""Blocking work in threads that nobody waits for once it is not wanted: a command that is interrupted ends at once.

asyncio's own threads and those of `concurrent.futures` are joined before the interpreter ends: a download from a server
that never answers would hold back Ctrl-C for as long as its timeouts last.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

A = TypeVar("A")
T = TypeVar("T")


async def in_background(work: Callable[[], T]) -> T:
    """What the work returns or raises; a cancelled caller leaves it behind, and it ends with the process."""
    return await asyncio.wrap_future(submit([work])[0])


def submit(works: Sequence[Callable[[], T]], at_once: int = 1) -> list[Future[T]]:
    """Begins all the works, `at_once` of them at a time; their results."""
    waiting: queue.SimpleQueue[tuple[Callable[[], T], Future[T]]] = queue.SimpleQueue()
    futures: list[Future[T]] = [Future() for _ in works]
    for pair in zip(works, futures, strict=True):
        waiting.put(pair)

    def run() -> None:
        while True:
            try:
                work, future = waiting.get_nowait()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    for _ in range(min(at_once, len(works))):
        threading.Thread(target=run, name="background", daemon=True).start()
    return futures
