"""Workers on a cluster in memory whose handlers wait at a gate: a test says when they may go on, and whether they seem
to compute meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from megaflow_stream.bus import TopicPartition
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.processing.engine import Engine
from megaflow_stream.processing.frames import Answer
from megaflow_stream.processing.member import Member, Options
from megaflow_stream.testing import LocalCompute, MemoryCluster
from tests.engine_cases.case import Case

DECLARED = Path(__file__).parent / "declared.py"
OPTIONS = Options(heartbeat_seconds=0.02, idle_commit_seconds=0.02, stuck_seconds=0.3)


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


@dataclass
class Worker:
    """A worker, and its gate."""

    engine: Engine
    gate: Gate
    stop: asyncio.Event
    task: asyncio.Task[None]
    ended: bool = False

    async def ends(self) -> None:
        """Waits for its end, and raises what ended it."""
        self.ended = True
        await asyncio.wait_for(self.task, 20)

    @property
    def member(self) -> Member:
        return self.engine.members[0]

    def paused(self) -> set[TopicPartition]:
        reader: Any = self.member.reader
        return set(reader._paused)

    def ready(self) -> bool:
        """Whether every partition is in hand."""
        parts = self.engine.members[0].parts if self.engine.members else {}
        return len(parts) == 2 and all(part.ready for part in parts.values())


@asynccontextmanager
async def worker(
    bus: Any, processor: Processor, *, options: Options = OPTIONS, **engine_options: Any
) -> AsyncIterator[Worker]:
    """Two partitions. At the end it is stopped; what ended it too early is raised."""
    gate = Gate([processor], {sink.topic: 2 for sink in processor.sinks})
    engine = Engine(bus, [(DECLARED, processor)], options=options, compute=gate, **engine_options)
    stop = asyncio.Event()
    task = asyncio.create_task(engine.run(stop))
    running = Worker(engine, gate, stop, task)
    try:
        yield running
    finally:
        gate.open.set()
        stop.set()
        if not running.ended:
            await running.ends()


def declared(case: Case, name: str, folder: Path) -> tuple[Path, Processor]:
    """The test's own copy of the declarations, since a path is loaded once a process."""
    path = folder / f"declared_{case.prefix.replace('.', '_')}.py"
    path.write_text(DECLARED.read_text())
    (found,) = [p for p in definitions(path, Processor) if p.name.endswith(name)]
    return path, found


async def until(true: Callable[[], bool], limit_seconds: float = 20.0) -> None:
    async with asyncio.timeout(limit_seconds):
        while not true():
            await asyncio.sleep(0.01)


async def finished(case: Case, cluster: MemoryCluster, processor: Processor) -> None:
    async with asyncio.timeout(60):  # of a starved machine
        while not await case.done(cluster.bus(), processor.group):
            await asyncio.sleep(0.01)
    assert await case.problems(cluster.bus(), dedup=False) == []
