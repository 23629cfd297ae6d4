"""A process keeps what it frees: the next block of the same size takes no page faults."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from megaflow_stream.allocator import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


for _ in range(3):
    blocks = [bytearray(1 << 20) for _ in range(16)]
    del blocks
before = faults()
for _ in range(10):
    blocks = [bytearray(1 << 20) for _ in range(16)]
    del blocks
print(faults() - before)
"""


def faults(how: str, **environment: str) -> int:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=clean | environment).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_freed_memory_is_kept_unless_somebody_else_decided() -> None:
    kept, given_back = faults("keep"), faults("leave")
    assert kept < given_back / 10, (kept, given_back)
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > given_back / 2
