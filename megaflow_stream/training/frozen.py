"""What a process has made before it trains stays, and is not looked through again and again by the collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """torch and what it imports are half a million objects: a full collection walks them for 0.25 s, in which no thread
    of the process goes on, and each 100,000 records that wait would bring one on."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
