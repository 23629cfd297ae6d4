"""`megaflow publish`: conversations out of files into a topic, once."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megaflow_stream.cli.context import Context, command_options, print_json, say
from megaflow_stream.errors import SettingError, UsageError

if TYPE_CHECKING:
    from megaflow_stream.definitions.topic import Topic
    from megaflow_stream.project.folder import Project
    from megaflow_stream.publishing.report import Report

_LINE_SECONDS = 5.0


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH|-...")
@click.option("--topic", default="conversations.raw", show_default=True, help="The topic to publish to.")
@click.option("--format", default="auto", show_default=True, help="auto, openai_chat, sharegpt or tau_bench.")
@click.option("--dataset", help="The dataset of these conversations.  [default: the setting publish.dataset]")
@click.option("--producer", help="Who publishes them.  [default: the setting publish.producer]")
@click.option("--rejects", type=click.Path(path_type=Path, dir_okay=False), help="Write bad records to this file.")
@click.option("--skip-bad", is_flag=True, help="Bad records do not make the exit code 1.")
@click.option("--again", is_flag=True, help="Publish also what was published before.")
@click.option("--dry-run", is_flag=True, help="Read and check everything, send nothing; needs no Kafka.")
@command_options
def publish(context: Context, paths: tuple[str, ...], **options: Any) -> int:
    """Publish the conversations of files, folders, globs, or standard input (-).

    JSON, JSON Lines and Parquet, plain or in gzip or zstd, in any mixture: told by content. Bad records are reported
    and the good ones published; the exit code is 1 then. Standard input is published when it ends, or a thousand
    conversations or 4 MiB at a time.

    Interrupted and repeated, it goes on where it stopped: what has been published to the topic and dataset is not
    published again. That is told by content, a thousand conversations (or 4 MiB) of a file at a time: a file that has
    grown at its end publishes what is new; one that has changed before its end is published again from there on, and
    de-duplication removes the doubles.

    Conversations that share an id and differ are all published; those of one command are counted.

    \b
    Example:
      megaflow publish conversations/ --rejects bad.jsonl
      zcat export.jsonl.gz | megaflow publish - --dataset support
    """
    options["dataset"] = options["dataset"] or context.settings.publish.dataset
    options["producer"] = options["producer"] or context.settings.publish.producer
    report = asyncio.run(_publish(context, paths, options))
    show_rejects(report, options["rejects"])
    if context.json:
        print_json(report.to_json())
    else:
        click.echo(summary(report))
    return report.exit_code


async def _publish(context: Context, paths: tuple[str, ...], options: dict[str, Any]) -> Report:
    from megaflow_stream.config.settings import check_dataset
    from megaflow_stream.conversations.detect import AUTO
    from megaflow_stream.conversations.files import sources
    from megaflow_stream.conversations.parsers import parser
    from megaflow_stream.publishing.publish import publish as task
    from megaflow_stream.publishing.report import check_rejects
    from megaflow_stream.runtime.connection import connected

    # What is wrong with the command is said before a service is started.
    found = sources(paths)
    if options["rejects"] is not None:
        check_rejects(options["rejects"], found)
    declared = _declared(context.project, options["topic"])
    if options["format"] != AUTO:
        parser(options["format"])
    try:
        check_dataset(options["dataset"])
    except ValueError as error:
        raise SettingError(f"--dataset {error}") from error
    with showing() as progress:
        if options["dry_run"]:
            if declared is not None:
                options["limit_bytes"] = declared.max_message_bytes
            return await task(None, paths, progress=progress, **options)
        async with connected(context.project, context.settings, kafka=True, s3=False) as connection:
            return await task(connection.bus, paths, progress=progress, **options)


def _declared(project: Project, name: str) -> Topic | None:
    """The project's topic of that name. Raises `UsageError` where it is for something else: no processor takes
    conversations from it, or one of them writes it."""
    from megaflow_stream.definitions.loading import definitions
    from megaflow_stream.definitions.processor import Processor
    from megaflow_stream.publishing.publish import TOPIC

    topic = next((topic for topic in project.topics() if topic.name == name), None)
    if topic is None or name == TOPIC:
        return topic
    files = sorted((project.root / "processors").glob("*.py"))
    processors = [processor for file in files for processor in definitions(file, Processor)]
    sources = {processor.source for processor in processors}
    sources -= {sink.topic for processor in processors for sink in processor.sinks}
    if processors and name not in sources:
        raise UsageError(
            f"--topic {name} is for something else: {topic.purpose or 'no processor takes conversations from it'}",
            hint=f"this project's processors take conversations from {' and '.join(sorted(sources)) or 'no topic'}; "
            "a topic that topics/ does not declare is yours to publish to",
        )
    return topic


def show_rejects(report: Report, path: Path | None) -> None:
    """What was left alone, the first bad records with file, line and reason, then how many more; on stderr."""
    for name, reason in report.passed.items():
        say(f"left alone: {name}: {reason}")
    for reject in report.first_rejects:
        say(f"bad record: {reject}")
    if more := report.rejected - len(report.first_rejects):
        say(f"and {more:,} more bad records")
    if report.rejected:
        say(f"all {report.rejected:,} are in {path}" if path else "--rejects FILE writes them all to a file")


def summary(report: Report) -> str:
    """What was done, in lines for a person."""
    done = "would be published" if report.dry_run else "published"
    formats = ", ".join(f"{name} {count:,}" for name, count in sorted(report.by_format.items()))
    rate = report.published / report.seconds if report.seconds > 0 else 0.0
    lines = [
        f"{report.published:,} conversations {done}"
        + (f" ({formats})" if formats else "")
        + f", {report.bytes / 1e6:.1f} MB in {report.seconds:.1f} s, {rate:,.0f}/s"
    ]
    if report.already_published:
        lines.append(f"{report.already_published:,} had been published before")
    if report.same_id_other_content:
        lines.append(f"{report.same_id_other_content:,} share the id of another of this input and differ; all are kept")
    if report.rejected:
        lines.append(f"{report.rejected:,} bad records were not published")
    return "\n".join(lines)


@contextmanager
def showing() -> Iterator[Callable[[Report], None]]:
    """Shows progress on stderr: a bar on a terminal, a line every few seconds where there is none."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[published]:,} published, {task.fields[rejected]:,} bad"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("publish", total=None, published=0, rejected=0)

        def show(report: Report) -> None:
            bar.update(
                task,
                total=report.total_bytes or None,
                completed=report.read_bytes,
                published=report.published,
                rejected=report.rejected,
            )

        yield show


def _lines() -> Callable[[Report], None]:
    last = time.monotonic()

    def show(report: Report) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_SECONDS:
            last = time.monotonic()
            say(f"{report.published:,} published, {report.rejected:,} bad, {report.read_bytes / 1e6:.0f} MB read")

    return show
