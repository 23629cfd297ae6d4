"""The real engine on a cluster in memory, for tests of a processor with faults and no broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from megaflow_stream.definitions.processor import Processor
from megaflow_stream.processing.engine import Engine
from megaflow_stream.processing.member import Options
from megaflow_stream.testing.cluster import MemoryCluster
from megaflow_stream.testing.processor import LocalCompute

# Nothing in memory needs a real pause: only the engine's own back-offs are left.
QUICK = Options(heartbeat_seconds=0.02, idle_commit_seconds=0.02)


async def drive(
    cluster: MemoryCluster,
    processor: Processor,
    *,
    until: Callable[[], bool] | None = None,
    path: Path | None = None,
    options: Options = QUICK,
    timeout_seconds: float = 60.0,
) -> Engine:
    """Runs a worker of `processor` until the condition holds (by default: everything readable of the source is
    committed), then stops it as SIGTERM does.

    path: the file that declares the processor; then its handler runs in a compute process, as in production, and may
    hang or die. Without it the handler runs here.
    Topics of the processor that are not there are made, with the source's number of partitions; the members of a family
    (`features.{dataset}`) are made by the caller. Raises what ended the worker, or TimeoutError."""
    create_topics(cluster, processor)
    counts = {name: len(topic.logs) for name, topic in cluster.topics.items()}
    compute = LocalCompute([processor], counts) if path is None else None
    engine = Engine(cluster.bus(), [(path or Path(), processor)], options=options, compute=compute)
    stop = asyncio.Event()
    worker = asyncio.create_task(engine.run(stop))
    try:
        async with asyncio.timeout(timeout_seconds):
            while not worker.done() and not (until() if until else caught_up(cluster, processor)):
                await cluster.changed.wait(0.05)
    except TimeoutError:
        raise TimeoutError(f"{processor.name} stands at {cluster.committed(processor.group)}") from None
    finally:
        stop.set()
        await asyncio.wait([worker])
    worker.result()
    return engine


def caught_up(cluster: MemoryCluster, processor: Processor) -> bool:
    """Whether the processor's group has committed everything that is readable of its source."""
    committed = cluster.committed(processor.group)
    return all(committed.get(log.partition, log.begin) >= log.stable for log in cluster.topic(processor.source).logs)


def create_topics(cluster: MemoryCluster, processor: Processor) -> None:
    """Makes what the processor writes to, where it is not there."""
    partitions = len(cluster.topic(processor.source).logs)
    names = [processor.dead_letters, processor.dropped, processor.statistics]
    names += [sink.topic for sink in processor.sinks if "{" not in sink.topic]
    names += [processor.state.changelog] if processor.state else []
    for name in names:
        cluster.create(name, partitions)
