"""`megaflow status`: what the components say about themselves; `status tail`: the records of a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import click

from megaflow_stream.cli.context import Context, command_options, print_json, print_table, say

_OWN = ("component", "kind", "state", "at_ms", "pid", "host", "age_seconds", "stale", "clock_ahead_seconds")
_SHOWN = 6  # figures of a component on its line


class _ShowByDefault(click.Group):
    """Without a subcommand it is `show`, options included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowByDefault)
def status() -> None:
    """One line a component: its state, how old that is, its main figures.

    A component that has not ended and was not heard for 35 s is marked as not heard. With --json one document:
    a list of what each component wrote, with `age_seconds` and `stale`.

    \b
    Example:
      megaflow status
      megaflow status --json | jq '.[] | select(.kind == "trainer") | .step'
      megaflow status tail status.events -o -10 -e
    """


@status.command(hidden=True)
@command_options
def show(context: Context) -> None:
    """One line a component: its state, how old that is, its main figures.

    \b
    Example:
      megaflow status --json
    """
    found = asyncio.run(_read(context))
    if context.json:
        print_json(list(found.values()))
        return
    if not found:
        say("no component has written a status yet: `megaflow run` starts them")
        return
    print_table(("component", "state", "age", "figures"), [_line(name, found[name]) for name in found])
    for name, document in found.items():
        if ahead := document.get("clock_ahead_seconds"):
            say(f"{name}: the clock of {document.get('host')} is {ahead:.0f} s ahead of this machine's")


@status.command()
@click.argument("topic", default="status.events")
@click.option(
    "-o",
    "--offset",
    default="beginning",
    show_default=True,
    metavar="beginning|end|N|-N",
    help="Where to begin: an offset N, or the last -N records of each partition.",
)
@click.option("-c", "--count", type=click.IntRange(min=0), help="End after so many records.")
@click.option("-e", "--exit-at-end", is_flag=True, help="End where the topic ends now, instead of going on.")
@click.option(
    "-p",
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only this partition; may be given again.",
)
@command_options
def tail(
    context: Context, topic: str, offset: str, count: int | None, exit_at_end: bool, partitions: tuple[int, ...]
) -> None:
    """Print the committed records of TOPIC, one JSON document a line, as they come.

    Each has topic, partition, offset, timestamp_ms, key, headers and value; a value that is JSON is shown as such,
    text as a string, anything else as {"base64": ...}.

    \b
    Example:
      megaflow status tail
      megaflow status tail conversations.clean -o -5 -e | jq .value
      megaflow status tail checkpoints -o end -c 1
    """
    asyncio.run(_tail(context, topic, offset, count, exit_at_end, partitions))


async def _read(context: Context) -> dict[str, dict[str, Any]]:
    from megaflow_stream.observe.status import read_status
    from megaflow_stream.runtime.connection import connected

    async with connected(context.project, context.settings, kafka=True, s3=False) as connection:
        return await read_status(connection.bus)


async def _tail(
    context: Context, topic: str, offset: str, count: int | None, exit_at_end: bool, partitions: tuple[int, ...]
) -> None:
    from megaflow_stream.observe.tail import describe, tail
    from megaflow_stream.runtime.connection import connected

    async with connected(context.project, context.settings, kafka=True, s3=False) as connection:
        records = tail(
            connection.bus, topic, begin=offset, count=count, until_end=exit_at_end, partitions=partitions or None
        )
        async with aclosing(records):
            async for record in records:
                print_json(describe(record))


def _line(name: str, document: Mapping[str, Any]) -> tuple[str, str, str, str]:
    state = str(document.get("state", "?"))
    if document.get("stale"):
        state += " (not heard)"
    return name, state, _age(document.get("age_seconds")), _figures(document)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _figures(document: Mapping[str, Any]) -> str:
    if document.get("error"):
        return str(document["error"])
    if document.get("waiting_for"):
        return f"waiting for {document['waiting_for']}"
    figures = {name: value for name, value in document.items() if name not in _OWN}
    plain = [(name, value) for name, value in figures.items() if isinstance(value, (int, float, str))]
    return "  ".join(f"{name} {_figure(value)}" for name, value in plain[:_SHOWN])


def _figure(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
