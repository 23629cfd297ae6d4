"""Ends a client of the library within a bound, whatever it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


async def end(stopping: Coroutine[Any, Any, object], seconds: float, what: str) -> bool:
    """Whether `stopping` ended well in time. Never raises what it raised.

    In a task of its own: aiokafka's `stop` may raise the CancelledError of one of its own tasks, which would look like
    a cancellation of whoever called it."""
    task = asyncio.ensure_future(stopping)
    await asyncio.wait([task], timeout=seconds)
    if not task.done():
        task.cancel()
        log.info("%s did not end within %.0f s", what, seconds)
        return False
    if task.cancelled():
        return False
    if (error := task.exception()) is not None:
        log.info("ending %s: %r", what, error)
        return False
    return True
