"""A condition that anybody may announce without waiting, and that is waited for with a timeout."""

from __future__ import annotations

import asyncio


class Signal:
    """Something changed in the cluster: a record, a transaction's end, an assignment."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def announce(self) -> None:
        """Wakes everybody who waits now."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, seconds: float | None) -> None:
        """Returns at the next announcement, or after so many seconds."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=seconds)
        finally:
            self._waiting.discard(future)
