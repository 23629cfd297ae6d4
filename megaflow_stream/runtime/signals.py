"""How a long-running process is told to stop: SIGTERM, SIGINT, or the end of the process that started it."""

from __future__ import annotations

import asyncio
import os
import signal

from megaflow_stream.runtime.lifeline import watch

EXIT_SECONDS = 12.0  # a process that was told to stop and has not ended by then ends hard


def stop_event(exit_seconds: float = EXIT_SECONDS) -> asyncio.Event:
    """An event that is set when this process is to stop. A second signal ends it at once, which harms nothing."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()
        loop.call_later(exit_seconds, os._exit, 1)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)

    watch(lambda: None if stop.is_set() else ask(), loop=loop)
    return stop
