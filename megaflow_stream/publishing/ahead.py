"""A generator that runs in a thread of its own, a few items ahead of whoever takes them.

Reading and parsing block: in the event loop's thread they would hold up what is being sent, and standard input that
gives nothing would hold it up for ever. The thread is a daemon: an interrupted program does not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar

T = TypeVar("T")


async def ahead(items: Iterator[T], *, limit: int) -> AsyncGenerator[T, None]:
    """The items in their order; at most `limit` wait to be taken. What the generator raises is raised here."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[tuple[bool, T | BaseException | None]] = asyncio.Queue()
    room = threading.Semaphore(limit)
    given_up = threading.Event()

    def put(more: bool, item: T | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(waiting.put_nowait, (more, item))

    def run() -> None:
        try:
            for item in items:
                put(True, item)
                room.acquire()
                if given_up.is_set():
                    return
            put(False, None)
        except BaseException as error:
            put(False, error)

    threading.Thread(target=run, name="publish-ahead", daemon=True).start()
    try:
        while True:
            more, item = await waiting.get()
            if not more:
                if isinstance(item, BaseException):
                    raise item
                return
            room.release()
            yield item  # type: ignore[misc]
    finally:
        given_up.set()
        room.release()
