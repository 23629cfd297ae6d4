"""`megaflow lineage`: from a checkpoint to the records that made it, and from a conversation to where it went."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from megaflow_stream.cli.checkpoints import trainers
from megaflow_stream.cli.context import Context, command_options, print_json, print_table, say
from megaflow_stream.errors import NotFound

if TYPE_CHECKING:
    import pyarrow as pa

    from megaflow_stream.checkpoint import ManifestRef
    from megaflow_stream.cli.whereabouts import Found
    from megaflow_stream.storage import ObjectStore

KINDS = click.Choice(["auto", "checkpoint", "conversation"])


@click.command()
@click.argument("what", metavar="CHECKPOINT|CONVERSATION_ID")
@click.option("--job", metavar="NAME", help="The job.  [default: every trainer of the pipeline]")
@click.option("--as", "kind", type=KINDS, default="auto", show_default=True, help="What the argument is.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Rows shown of a checkpoint.")
@command_options
def lineage(context: Context, what: str, job: str | None, kind: str, limit: int) -> int:
    """Show which records made a checkpoint, or where a conversation went.

    A checkpoint is a step, a key, an alias such as `best`, or `head`. A conversation was trained (at which steps), is
    waiting, validation, dropped (a duplicate, for instance) or a dead letter; exit code 1 where it was not seen.

    \b
    Example:
      megaflow lineage best
      megaflow lineage 7f1c0a52 --json | jq '.found[] | select(.what == "trained")'
    """
    jobs = [job] if job else trainers(context)
    return asyncio.run(_lineage(context, what, jobs, kind, limit))


async def _lineage(context: Context, what: str, jobs: list[str], kind: str, limit: int) -> int:
    from megaflow_stream.runtime.connection import connected

    if kind != "conversation":
        async with connected(context.project, context.settings, kafka=False) as connection:
            found = await _checkpoint(connection.store, what, jobs)
            if found is not None:
                job, ref, rows = found
                _print_checkpoint(context, job, ref, rows, limit)
                return 0
        if kind == "checkpoint":
            raise NotFound(
                f"there is no checkpoint {what!r} of {', '.join(jobs) or 'any trainer'}",
                hint="`megaflow checkpoints list` shows those there are",
            )
    from megaflow_stream.cli.whereabouts import find, held_out

    project = context.project
    steps = [
        processor
        for stage in project.pipeline().ordered()
        if project.kind(stage) == "processor"
        for _, processor in project.processors(stage)
    ]
    declared = [project.trainer(job)[1] for job in jobs]
    async with connected(context.project, context.settings) as connection:
        places = await find(connection.bus, connection.store, what, declared, steps)
    _print_conversation(context, what, places, held_out(what, steps))
    return 0 if places else 1


async def _checkpoint(store: ObjectStore, what: str, jobs: list[str]) -> tuple[str, ManifestRef, pa.Table] | None:
    """The first job's checkpoint of this name, with every record that made it; None where no job has one."""
    from megaflow_stream.checkpoint import lineage as lines
    from megaflow_stream.checkpoint import names, read_manifest, resolve
    from megaflow_stream.errors import SettingError

    for job in jobs:
        full = f"{names.prefix(job)}manifests/{what}"
        try:
            ref = await resolve(store, job, full if names.parse_manifest(full) else what)
            manifest = await read_manifest(store, ref)
        except (NotFound, SettingError):  # no such step or alias; or no name of an alias at all
            continue
        return manifest.job, ref, await lines.of_checkpoint(store, manifest)
    return None


def _print_checkpoint(context: Context, job: str, ref: ManifestRef, rows: pa.Table, limit: int) -> None:
    import pyarrow.compute as pc

    records = rows.group_by(["topic", "partition", "offset"]).aggregate([]).num_rows
    figures: dict[str, Any] = {
        "job": job,
        "step": ref.step,
        "manifest": ref.manifest,
        "conversations": pc.count_distinct(rows["conversation"]).as_py(),
        "records": records,
        "steps": pc.count_distinct(rows["step"]).as_py(),
    }
    if context.json:
        print_json({**figures, "rows": rows.to_pylist()})
        return
    say(
        f"{job}, step {ref.step}: {figures['conversations']} conversations in {records} packed sequences, "
        f"trained in {figures['steps']} steps"
    )
    shown = rows.slice(max(0, rows.num_rows - limit)).to_pylist()
    print_table(rows.column_names, [tuple(row.values()) for row in shown])
    if rows.num_rows > limit:
        say(f"the last {limit} of {rows.num_rows} rows; --limit N shows more, --json all")


def _print_conversation(context: Context, conversation: str, places: list[Found], held_out: bool) -> None:
    if context.json:
        print_json({"conversation": conversation, "held_out": held_out, "found": [asdict(place) for place in places]})
        return
    if not places:
        say(f"{conversation} was not seen: neither trained, dropped, a dead letter, nor published")
        return
    print_table(
        ("what", "where", "details"),
        [
            (
                place.what.replace("_", " "),
                f"{place.topic}/{place.partition}/{place.offset}",
                ", ".join(f"{name} {value}" for name, value in place.details.items() if value is not None),
            )
            for place in places
        ],
    )
