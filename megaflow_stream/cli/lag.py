"""`megaflow lag`: how far each reader is behind."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

import click

from megaflow_stream.cli.context import Context, command_options, print_json, print_table, say

if TYPE_CHECKING:
    from megaflow_stream.observe.lag import PartitionLag

COLUMNS = ("group", "topic", "partition", "position", "end", "records", "bytes", "seconds", "")


@click.command()
@click.option("--watch", is_flag=True, help="Show it again and again until Ctrl-C.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
@click.argument("groups", nargs=-1)
@command_options
def lag(context: Context, groups: tuple[str, ...], watch: bool, every: float) -> None:
    """Records, bytes and seconds behind, per group and partition; only GROUPS where any are named.

    Counted from the positions of consumer groups; a trainer's is what it has planned to train. Records that an open
    transaction has written are not readable yet, and no lag. A `~` marks an estimate, `?` an unknown; seconds is the
    age of the oldest unread record.

    \b
    Example:
      megaflow lag
      megaflow lag --watch
      megaflow lag --json | jq 'map(.records) | add'
    """
    with contextlib.suppress(KeyboardInterrupt) if watch else contextlib.nullcontext():
        asyncio.run(_lag(context, groups, every if watch else None))


async def _lag(context: Context, groups: tuple[str, ...], every: float | None) -> None:
    from megaflow_stream.observe.lag import measure
    from megaflow_stream.project.readers import followers
    from megaflow_stream.runtime.connection import connected

    async with connected(context.project, context.settings, kafka=True, s3=False) as connection:
        while True:
            chosen = [f for f in followers(context.project) if not groups or f.group in groups]
            found = await measure(connection.bus, chosen)
            if every is not None and sys.stdout.isatty():
                click.clear()
            if context.json:
                print_json([line.document() for line in found])
            else:
                _print(found)
            if every is None:
                return
            await asyncio.sleep(every)


def _print(found: list[PartitionLag]) -> None:
    if not found:
        say("no group reads a topic that is there yet: `megaflow run` starts them")
        return
    print_table(COLUMNS, [_line(line) for line in found])
    records = sum(line.records for line in found)
    about = "" if all(line.exact for line in found) else "about "
    say(f"{about}{records} records behind" if records else "nobody is behind")


def _line(line: PartitionLag) -> tuple[object, ...]:
    about = "" if line.exact else "~"
    notes = []
    if line.open_transactions:
        notes.append("open transaction")
    if line.expired_records:
        notes.append(f"{line.expired_records} offsets expired unread")
    return (
        line.group,
        line.topic,
        line.partition,
        "-" if line.position is None else line.position,
        line.stable_offset,
        f"{about}{line.records}",
        f"{about}{line.bytes}",
        "?" if line.seconds is None else f"{line.seconds:.1f}",
        ", ".join(notes),
    )
