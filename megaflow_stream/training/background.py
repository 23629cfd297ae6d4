"""A thread with an event loop of its own, for what must go on while the training thread computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Runs coroutines on its own loop. The thread is a daemon: a rank that ends does not wait for it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts it; returns at once."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Starts it and waits. Raises what it raises, or TimeoutError."""
        return self.submit(work).result(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Cancels what is still running, and ends the thread."""

        async def cancel() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=timeout_seconds)

        if self.loop.is_closed():
            return
        try:
            self.call(cancel(), timeout_seconds + 1)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_seconds)
            if not self._thread.is_alive():
                self.loop.close()
