"""Lets a process keep the memory that it frees, for the next batch of the same size.

glibc gives large blocks back to the kernel when they are freed, and takes page faults when the next batch needs them
again: in a training step about 2,000 of them, 3 % of its time; for a consumer of large fetches a quarter of its rate
(`benchmarks/training.py`, `benchmarks/loader.py`).
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES = 1 << 30  # freed memory at the end of the heap that the process keeps
BLOCK_BYTES = 32 << 20  # larger blocks are the kernel's each time; the most that any glibc accepts


def keep_freed_memory() -> None:
    """Once, at the start of a process that moves much data. The process keeps what it used at most, up to 1 GiB.

    Whoever set MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_ has the last word; without glibc nothing changes."""
    set_already = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or set_already:
        return
    mallopt(_M_MMAP_THRESHOLD, BLOCK_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
