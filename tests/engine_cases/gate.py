"""Handlers behind a gate: a test says when they may go on, and whether they seem to compute meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import pyarrow as pa

from megaflow_stream.definitions.processor import Processor
from megaflow_stream.processing.frames import Answer
from megaflow_stream.testing import LocalCompute


class Gate:
    """See `processing.compute.Compute`. `open` lets handlers through; `computing` makes the CPU clock run."""

    def __init__(self, processors: Sequence[Processor], partitions: Mapping[str, int]) -> None:
        self._inner = LocalCompute(processors, partitions)
        self.open = asyncio.Event()
        self.computing = False

    async def call(self, number: int, batch: pa.RecordBatch, hang_seconds: float) -> Answer:
        await self.open.wait()
        return await self._inner.call(number, batch, hang_seconds)

    def cpu_seconds(self) -> float:
        return time.monotonic() if self.computing else 0.0

    async def close(self) -> None:
        """Holds nothing."""
