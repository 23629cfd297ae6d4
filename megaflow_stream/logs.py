"""Logging of every process: messages on stderr, one format, and a client library that cannot flood it.

With the broker down aiokafka writes tens of thousands of lines a minute; `Once` lets a repeated
message through once in a while and counts the rest.
"""

from __future__ import annotations

import logging
import sys
import time


class Once(logging.Filter):
    """Lets a message of one logger and template through once in `seconds`, then says how many were left out."""

    def __init__(self, seconds: float = 30.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, str(record.msg)[:60]), time.monotonic()
        last, count = self.seen.get(key, (-1e9, 0))
        if now - last < self.seconds:
            self.seen[key] = (last, count + 1)
            return False
        self.seen[key] = (now, 0)
        if count:
            record.msg = f"{record.msg} (and {count} more like it)"
        return True


def setup(component: str, level: int = logging.INFO) -> None:
    """Logs of this process go to stderr, each line with the component's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {component} %(levelname).1s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    quiet = Once()
    for name in ("aiokafka", "kafka", "aiobotocore", "botocore", "faust", "mode", "stamina"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("asyncio").addFilter(_not_of_a_thrown_away_producer)
    handler.addFilter(lambda record: quiet.filter(record) if record.name.startswith("aiokafka") else True)


def _not_of_a_thrown_away_producer(record: logging.LogRecord) -> bool:
    """aiokafka's fenced producer leaves futures inside that nobody can await; its owner has seen the error already."""
    error = record.exc_info[1] if record.exc_info else None
    return not ("never retrieved" in record.getMessage() and type(error).__module__.startswith("aiokafka"))
