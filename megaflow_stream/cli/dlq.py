"""`megaflow dlq`: the dead-letter topic."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from megaflow_stream.cli.context import Context, command_options, print_json, print_table, say
from megaflow_stream.cli.later import replay

if TYPE_CHECKING:
    from megaflow_stream.observe.dead_letters import DeadLetter


@click.group()
def dlq() -> None:
    """Dead letters: records that a processor could not take, with where they came from and why.

    \b
    Example:
      megaflow dlq list
      megaflow dlq show 0/17
    """


dlq.add_command(replay)


@dlq.command(name="list")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="The newest so many.")
@click.option("--processor", metavar="NAME", help="Only those of this processor.")
@click.option("--error", metavar="TEXT", help="Only those whose error has this text.")
@click.option("--topic", metavar="TOPIC", help="Only those that came from this topic.")
@command_options
def list_(context: Context, limit: int, processor: str | None, error: str | None, topic: str | None) -> None:
    """List dead letters, the newest last: place, origin, attempts, conversation, error.

    \b
    Example:
      megaflow dlq list --processor clean --limit 20
      megaflow dlq list --json | jq 'group_by(.error) | map({error: .[0].error, letters: length})'
    """
    found, total = asyncio.run(_list(context, limit=limit, processor=processor, error=error, origin=topic))
    if context.json:
        print_json([asdict(letter) for letter in found])
        return
    if not found:
        say("there are no dead letters" + (" like that" if processor or error or topic else ""))
        return
    columns = ("place", "processor", "origin", "attempt", "conversation", "error")
    print_table(columns, [_line(letter) for letter in found])
    if total > len(found):
        say(f"the newest {len(found)} of {total}; --limit shows more")


@dlq.command()
@click.argument("place", metavar="PARTITION/OFFSET")
@command_options
def show(context: Context, place: str) -> None:
    """Show one dead letter: its headers, its key and its value as they came.

    \b
    Example:
      megaflow dlq show 0/17
      megaflow dlq show 0/17 --json | jq .value
    """
    partition, slash, offset = place.partition("/")
    if not (slash and partition.isdigit() and offset.isdigit()):
        raise click.BadParameter(f"{place!r} is not PARTITION/OFFSET, like 0/17", param_hint="place")
    letter = asyncio.run(_show(context, int(partition), int(offset)))
    if context.json:
        print_json(letter)
        return
    for name, value in (("key", letter["key"]), *letter["headers"].items()):
        click.echo(f"{name}: {value}")
    click.echo("")
    click.echo(_pretty(letter["value"]))


async def _list(context: Context, **options: Any) -> tuple[list[DeadLetter], int]:
    from megaflow_stream.observe.dead_letters import list_letters
    from megaflow_stream.runtime.connection import connected

    async with connected(context.project, context.settings, kafka=True, s3=False) as connection:
        return await list_letters(connection.bus, **options)


async def _show(context: Context, partition: int, offset: int) -> dict[str, Any]:
    from megaflow_stream.observe.dead_letters import show_letter
    from megaflow_stream.runtime.connection import connected

    async with connected(context.project, context.settings, kafka=True, s3=False) as connection:
        return await show_letter(connection.bus, partition, offset)


def _line(letter: DeadLetter) -> tuple[object, ...]:
    origin = f"{letter.origin_topic}/{letter.origin_partition}/{letter.origin_offset}" if letter.origin_topic else None
    return letter.id, letter.processor, origin, letter.attempt, letter.conversation, (letter.error or "")[:200]


def _pretty(value: Any) -> str:
    if isinstance(value, str):
        return value
    import orjson

    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
