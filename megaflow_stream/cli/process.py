"""`megaflow process`: one worker, in the foreground. Another worker is another process."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import click

from megaflow_stream.cli.context import Context, command_options, say

if TYPE_CHECKING:
    from pathlib import Path

    from megaflow_stream.definitions.processor import Processor
    from megaflow_stream.project.folder import Project

STATISTICS = "statistics"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--component", hidden=True, help="The worker's name in status; one of its own by default.")
@command_options
def process(context: Context, names: tuple[str, ...], component: str | None) -> None:
    """Run one worker of the processors NAMES (stages or processors; all of the pipeline's without any).

    `statistics` is the agent that keeps the statistics of datasets and producers. Runs until SIGTERM or Ctrl-C.

    \b
    Example:
      megaflow process data_preprocess
      megaflow process clean
    """
    if STATISTICS in names:
        if len(names) > 1:
            raise click.UsageError("`statistics` runs alone, in a process of its own")
        asyncio.run(_statistics(context))
        return
    works = _works(context.project, names)
    name = component or f"worker/{'+'.join(names) or 'all'}/{os.getpid()}"
    say(f"{name}: {', '.join(processor.name for _, processor in works)}")
    asyncio.run(_worker(context, works, name))


def _works(project: Project, names: tuple[str, ...]) -> list[tuple[Path, Processor]]:
    """The processors of stages or processors by name, in the order of the stream."""
    stages = [stage.name for stage in project.pipeline().ordered() if project.kind(stage) == "processor"]
    found: list[tuple[Path, Processor]] = []
    for name in names or stages:
        if name in stages or (project.root / "processors" / f"{name}.py").is_file():
            found += project.processors(name)
        else:
            found.append(project.processor(name))
    return list({processor.name: (path, processor) for path, processor in found}.values())


async def _worker(context: Context, works: list[tuple[Path, Processor]], name: str) -> None:
    from megaflow_stream.allocator import keep_freed_memory
    from megaflow_stream.observe.status import StatusWriter
    from megaflow_stream.processing.engine import Engine
    from megaflow_stream.runtime.connection import connected
    from megaflow_stream.runtime.signals import stop_event

    keep_freed_memory()
    stop = stop_event()
    async with (
        connected(context.project, context.settings, kafka=True, s3=False) as connection,
        StatusWriter(connection.bus, name, "worker") as status,
    ):
        await Engine(connection.bus, works, status=status).run(stop)


async def _statistics(context: Context) -> None:
    from megaflow_stream.processing.faust_runner import run_statistics
    from megaflow_stream.runtime.connection import connected
    from megaflow_stream.runtime.signals import stop_event

    stop = stop_event()
    async with connected(context.project, context.settings, kafka=True, s3=False) as connection:
        await run_statistics(connection.endpoints.bootstrap_servers, connection.endpoints.security, stop)
