"""`megaflow checkpoints`: what there is, whether it is whole, and how to take it out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from megaflow_stream.cli.context import Context, command_options, print_json, print_table, say
from megaflow_stream.config.units import parse_duration
from megaflow_stream.errors import NotFound, SettingError, UsageError

if TYPE_CHECKING:
    from megaflow_stream.checkpoint import Manifest, ManifestRef
    from megaflow_stream.storage import ObjectStore

T = TypeVar("T")


class Duration(click.ParamType):
    """`30s`, `15m`, `2h` -> seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_duration(value) if isinstance(value, str) else float(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


WHICH = "A checkpoint is named by its step, its key, an alias such as `best`, or `head`, the newest."


@click.group()
def checkpoints() -> None:
    """Checkpoints of the project's trainer: list, show, verify, prune, export.

    \b
    Example:
      megaflow checkpoints list
      megaflow checkpoints export best --output model.safetensors
    """


def job_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--job", metavar="NAME", help="The job.  [default: the project's trainer]")(command)


def job_of(context: Context, job: str | None) -> str:
    """The job that was named, or the only trainer of the pipeline."""
    if job:
        return job
    names = trainers(context)
    if len(names) != 1:
        raise UsageError(
            f"the pipeline has {len(names)} trainers{': ' if names else ''}{', '.join(names)}",
            hint="say which with --job NAME",
        )
    return names[0]


def trainers(context: Context) -> list[str]:
    """Names of the pipeline's trainers."""
    project = context.project
    return [stage.name for stage in project.pipeline().ordered() if project.kind(stage) == "trainer"]


def on_store(context: Context, work: Callable[[ObjectStore], Awaitable[T]]) -> T:
    """Runs `work` on the project's store."""
    from megaflow_stream.runtime.connection import connected

    async def run() -> T:
        async with connected(context.project, context.settings, kafka=False) as connection:
            return await work(connection.store)

    return asyncio.run(run())


@dataclass(frozen=True, kw_only=True)
class Row:
    """A checkpoint as listed. state: `head`, `kept` in the head's chain, `aside` when never the head or given up."""

    step: int
    manifest: str
    created: str
    state: str
    size_bytes: int
    new_bytes: int
    counters: dict[str, Any] = field(default_factory=dict)
    aliases: Sequence[str] = ()


async def rows(store: ObjectStore, job: str) -> list[Row]:
    """Every checkpoint of a job, the newest first."""
    from megaflow_stream.checkpoint import ManifestRef, alias, chain, head, names, read_manifest

    top = await head(store, job)
    manifests: dict[str, tuple[ManifestRef, Manifest]] = {}
    async for ref, manifest in chain(store, top.ref if top else None):
        manifests[ref.manifest] = ref, manifest
    kept = set(manifests)
    async for info in store.list(f"{names.prefix(job)}manifests/"):
        parsed = names.parse_manifest(info.key)
        if parsed and info.key not in manifests:
            try:
                manifest = await read_manifest(store, info.key)
            except NotFound:
                continue
            manifests[info.key] = ManifestRef(info.key, "", parsed[0]), manifest
    aliases: dict[str, list[str]] = {}
    async for named in alias.every(store, job):
        aliases.setdefault(named.manifest, []).append(named.name)
    found = []
    for key, (ref, manifest) in manifests.items():
        chunks = manifest.chunks()
        before = manifests.get(manifest.parent.manifest) if manifest.parent else None
        new = chunks.keys() - (before[1].chunks().keys() if before else set())
        found.append(
            Row(
                step=ref.step,
                manifest=key,
                created=_time(manifest.created_ms),
                state="head" if top and key == top.manifest else "kept" if key in kept else "aside",
                size_bytes=sum(chunks.values()),
                new_bytes=sum(chunks[sha256] for sha256 in new),
                counters=counters(manifest),
                aliases=aliases.get(key, ()),
            )
        )
    return sorted(found, key=lambda row: (row.step, row.created), reverse=True)


def counters(manifest: Manifest) -> dict[str, Any]:
    """What the trainer counted until then (records, tokens, ...), and the last step's loss."""
    said = manifest.state.get("totals")
    loss = manifest.state.get("loss")
    return {**(said if isinstance(said, dict) else {}), **({} if loss is None else {"loss": loss})}


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def size(number: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


@checkpoints.command(name="list")
@job_option
@command_options
def list_(context: Context, job: str | None) -> None:
    """Every checkpoint, the newest first: step, size, what was new in it, aliases.

    \b
    Example:
      megaflow checkpoints list --json | jq '.[0].step'
    """
    found = on_store(context, lambda store: rows(store, job_of(context, job)))
    if context.json:
        print_json([asdict(row) for row in found])
        return
    if not found:
        say(f"{job_of(context, job)} has no checkpoint yet")
        return
    print_table(
        ("step", "created", "records", "loss", "size", "new", "state", "aliases", "key"),
        [
            (
                row.step,
                row.created,
                row.counters.get("records"),
                f"{row.counters['loss']:.4f}" if isinstance(row.counters.get("loss"), float) else None,
                size(row.size_bytes),
                size(row.new_bytes),
                row.state,
                ", ".join(row.aliases),
                row.manifest.rpartition("/")[2],
            )
            for row in found
        ],
    )


@checkpoints.command(
    help=f"Show one checkpoint: offsets, state, tensors, lineage.\n\n{WHICH}\n\n\b\nExample:\n"
    "  megaflow checkpoints show best"
)
@click.argument("which", default="head")
@job_option
@command_options
def show(context: Context, which: str, job: str | None) -> None:
    from megaflow_stream.checkpoint import read_manifest, resolve

    async def work(store: ObjectStore) -> tuple[ManifestRef, Manifest]:
        ref = await resolve(store, job_of(context, job), _full(which, job_of(context, job)))
        return ref, await read_manifest(store, ref)

    ref, manifest = on_store(context, work)
    kinds: dict[str, list[int]] = {}
    for tensor in manifest.tensors:
        count = kinds.setdefault(tensor.spec.kind, [0, 0])
        count[0] += 1
        count[1] += tensor.spec.size_bytes
    if context.json:
        print_json(
            {
                "manifest": ref.manifest,
                "sha256": ref.sha256,
                "job": manifest.job,
                "step": manifest.step,
                "created_ms": manifest.created_ms,
                "parent": manifest.parent.to_json() if manifest.parent else None,
                "definition": manifest.definition,
                "state": manifest.state,
                "lineage": asdict(manifest.lineage),
                "chunks": len(manifest.chunks()),
                "tensors": [asdict(tensor.spec) for tensor in manifest.tensors],
            }
        )
        return
    facts: list[tuple[str, object]] = [
        ("key", ref.manifest),
        ("step", manifest.step),
        ("created", _time(manifest.created_ms)),
        ("parent", manifest.parent.manifest if manifest.parent else "none, the job's first"),
        *((f"{kind} tensors", f"{n}, {size(total)}") for kind, (n, total) in kinds.items()),
        ("chunks", len(manifest.chunks())),
        ("lineage", f"{manifest.lineage.rows} conversations' records since the parent"),
        *((f"definition {name}", value) for name, value in manifest.definition.items()),
        *((f"next offset of {name}", offset) for name, offset in manifest.offsets.items()),
        *((name, value) for name, value in counters(manifest).items()),
    ]
    print_table(("", ""), facts)


@checkpoints.command(
    help=f"Read every chunk again and compare hashes. Without WHICH all of the head's chain.\n\n"
    f"{WHICH} Exit code 1 where anything is damaged.\n\n\b\nExample:\n"
    "  megaflow checkpoints verify\n  megaflow checkpoints verify 1200"
)
@click.argument("which", required=False)
@job_option
@command_options
def verify(context: Context, which: str | None, job: str | None) -> int:
    from megaflow_stream.checkpoint import Verified, read_manifest, resolve
    from megaflow_stream.checkpoint import verify as verify_one
    from megaflow_stream.errors import Damaged

    async def work(store: ObjectStore) -> list[Verified]:
        name = job_of(context, job)
        if which is not None:
            return [await verify_one(store, await resolve(store, name, _full(which, name)))]
        ref: ManifestRef | None = await resolve(store, name)
        good: set[str] = set()
        results: list[Verified] = []
        while ref is not None:
            try:
                parent = (await read_manifest(store, ref)).parent
            except NotFound:
                if results:
                    break  # pruned
                parent = None
            except Damaged:
                parent = None
            results.append(await verify_one(store, ref, good=good))
            say(f"step {ref.step}: {'; '.join(results[-1].problems) or 'whole'}")
            ref = parent
        return results

    results = on_store(context, work)
    bad = [result for result in results if result.problems]
    if context.json:
        print_json([asdict(result) for result in results])
    else:
        print_table(
            ("step", "chunks", "size", "problems"),
            [(r.step, r.chunks, size(r.size_bytes), "; ".join(r.problems) or "none") for r in results],
        )
    return 1 if bad else 0


@checkpoints.command()
@click.option("--keep", type=click.IntRange(min=2), default=20, show_default=True, help="How many of the newest stay.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option(
    "--grace",
    "grace_seconds",
    type=Duration(),
    default="10m",
    show_default=True,
    help="What nobody refers to is left while younger: a save under way may be about to.",
)
@job_option
@command_options
def prune(context: Context, keep: int, dry_run: bool, grace_seconds: float, job: str | None) -> None:
    """Delete checkpoints but the newest, the head, and those with an alias. Lineage of what stays is kept whole.

    \b
    Example:
      megaflow checkpoints prune --keep 5 --dry-run
    """
    from megaflow_stream.checkpoint import prune as prune_job

    report = on_store(
        context,
        lambda store: prune_job(store, job_of(context, job), keep, dry_run=dry_run, grace_seconds=grace_seconds),
    )
    if context.json:
        print_json({"dry_run": dry_run, **asdict(report)})
        return
    gone = "would go" if dry_run else "are gone"
    say(
        f"{len(report.kept)} checkpoints stay; {len(report.manifests)} checkpoints and {len(report.chunks)} chunks "
        f"({size(report.freed_bytes)}) {gone}; {report.young} objects are too young"
    )


@checkpoints.command(
    help=f"Write a checkpoint's model to a safetensors file.\n\n{WHICH} Parameters are renamed by the "
    "trainer's `export`, where it declares one.\n\n\b\nExample:\n"
    "  megaflow checkpoints export best --output model.safetensors"
)
@click.argument("which", default="head")
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="[default: JOB-STEP.safetensors]")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@job_option
@command_options
def export(context: Context, which: str, output: Path | None, force: bool, job: str | None) -> None:
    from megaflow_stream.checkpoint import MODEL, Loaded, load
    from megaflow_stream.checkpoint.export import export as write

    name = job_of(context, job)
    try:
        rename = context.project.trainer(name)[1].export
    except SettingError as error:
        rename = None  # a job of another project, or one whose trainer is gone
        say(f"{error}: parameters keep their names")

    async def work(store: ObjectStore) -> Loaded:
        return await load(store, name, _full(which, name), kinds=MODEL)

    loaded = on_store(context, work)
    for skipped in loaded.skipped:
        say(f"step {skipped.step} was left out: {skipped.reason}")
    path = output or Path(f"{name}-{loaded.manifest.step}.safetensors")
    size_bytes = write(loaded, path, rename=rename, overwrite=force)
    if context.json:
        print_json({"file": str(path), "size_bytes": size_bytes, "step": loaded.manifest.step, "manifest": loaded.key})
    else:
        say(f"{path}: {len(loaded.tensors)} tensors, {size(size_bytes)}, step {loaded.manifest.step}")


def _full(which: str, job: str) -> str:
    """A manifest's key also by its last part, as `list` shows it."""
    from megaflow_stream.checkpoint import names

    full = f"{names.prefix(job)}manifests/{which}"
    return full if names.parse_manifest(full) else which
