"""`megaflow topics`: the declared topics and the cluster's."""

from __future__ import annotations

import asyncio

import click

from megaflow_stream.cli.context import Context, command_options, print_json, print_table, say
from megaflow_stream.config.units import show_duration
from megaflow_stream.definitions.topic import Topic
from megaflow_stream.project import topics as task


@click.group()
def topics() -> None:
    """Declared topics against the cluster.

    \b
    Example:
      megaflow topics diff
    """


@topics.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be changed.")
@command_options
def apply(context: Context, dry_run: bool) -> int:
    """Make the cluster match topics/*.yaml: create, set settings, add partitions. Nothing is deleted, ever.

    Exits 1 where a topic has more partitions than declared: they never shrink.

    \b
    Example:
      megaflow topics apply --dry-run
    """
    changes, made = asyncio.run(_apply(context, dry_run))
    refused = [change for change in changes if change.action == "refused"]
    if context.json:
        print_json({"dry_run": dry_run, "made": _plain(made), "refused": _plain(refused)})
    elif made or refused:
        _print([*made, *refused])
    if not made and not refused:
        say("the cluster has every topic as declared: nothing to do")
    elif made:
        say(f"{len(made)} changes {'would be' if dry_run else 'were'} made")
    return 1 if refused else 0


@topics.command()
@command_options
def diff(context: Context) -> int:
    """Show where the cluster differs from topics/*.yaml. Exits 1 when it does.

    Topics that the statistics agent makes, and topics that are not declared, are listed and are no difference.

    \b
    Example:
      megaflow topics diff --json | jq '.[] | select(.drift)'
    """
    changes = asyncio.run(_diff(context))
    if context.json:
        print_json(_plain(changes))
    elif changes:
        _print(changes)
    drift = sum(change.drift for change in changes)
    say(f"{drift} differences: `megaflow topics apply` makes them go" if drift else "the cluster is as declared")
    return 1 if drift else 0


@topics.command(name="list")
@command_options
def list_(context: Context) -> None:
    """List the declared topics, what each is for and whether the cluster has it, then the other topics there.

    \b
    Example:
      megaflow topics list
    """
    declared = context.project.topics()
    changes = asyncio.run(_diff(context))
    states = {change.topic: change for change in changes}
    lines = [_line(topic, states.get(topic.name)) for topic in declared]
    lines += [
        {"topic": change.topic, "state": change.action, "purpose": change.detail}
        for change in changes
        if not change.drift
    ]
    if context.json:
        print_json(lines)
        return
    columns = ("topic", "partitions", "key", "value", "cleanup", "retention", "state", "purpose")
    print_table(columns, [[line.get(column) for column in columns] for line in lines])


async def _diff(context: Context) -> list[task.Change]:
    from megaflow_stream.runtime.connection import connected

    declared = context.project.topics()
    async with connected(context.project, context.settings, kafka=True, s3=False) as connection:
        return await task.diff(connection.bus, declared)


async def _apply(context: Context, dry_run: bool) -> tuple[list[task.Change], list[task.Change]]:
    from megaflow_stream.runtime.connection import connected

    declared = context.project.topics()
    copies = context.settings.kafka.replication_factor
    async with connected(context.project, context.settings, kafka=True, s3=False) as connection:
        changes = await task.diff(connection.bus, declared)
        made = await task.apply(connection.bus, changes, dry_run=dry_run, replication_factor=copies)
        return changes, made


def _line(topic: Topic, change: task.Change | None) -> dict[str, object]:
    return {
        "topic": topic.name,
        "partitions": topic.partitions,
        "key": topic.key or None,
        "value": topic.value,
        "cleanup": topic.cleanup,
        "retention": "forever" if topic.retention_seconds < 0 else show_duration(topic.retention_seconds),
        "state": _state(change),
        "purpose": topic.purpose,
    }


def _state(change: task.Change | None) -> str:
    if change is None:
        return "as declared"
    return "missing" if change.action == "create" else "differs"


def _plain(changes: list[task.Change]) -> list[dict[str, object]]:
    return [
        {"topic": change.topic, "action": change.action, "detail": change.detail, "drift": change.drift}
        for change in changes
    ]


def _print(changes: list[task.Change]) -> None:
    print_table(("topic", "action", "detail"), [(c.topic, c.action, c.detail) for c in changes])
