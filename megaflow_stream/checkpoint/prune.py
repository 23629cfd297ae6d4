"""Deletes checkpoints that nobody needs: keeps the head, the newest of its chain, and whatever an alias names.

Manifests go first, then the chunks that no kept manifest holds: a crash in between leaves garbage, never a manifest
without its chunks. The lineage of the kept chain stays, down to the job's first: lineage outlives the weights.

What is being evaluated stays, and what is deleted is not promoted: see `hold`.

A save that is under way has uploaded chunks that no manifest holds yet. Its mark (`writer`) says since when: what was
written later stays, however long the save takes. The mark is read before the head, so that a save which ends in between
is seen in one or the other. What a save leaves out because its parent holds it is safe: its parent is the head. A
trainer that repeats steps writes the very bytes of an older try again: only what was older than `grace_seconds` when
the prune began goes, and an object's age is looked up once more right before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megaflow_stream.checkpoint import alias, lineage, names
from megaflow_stream.checkpoint.head import head
from megaflow_stream.checkpoint.hold import mark, sweep
from megaflow_stream.checkpoint.manifest import Manifest
from megaflow_stream.checkpoint.reader import chain, read_manifest
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.errors import Damaged, NotFound, SettingError
from megaflow_stream.storage.api import ObjectInfo, ObjectStore

SAVE_SECONDS = 86400.0  # no save takes a day: an older mark is of a trainer that was killed, and is not back


@dataclass(slots=True)
class Pruned:
    """What was deleted, or would be: keys, and the bytes they held; and the manifests that stay, newest first.

    young: objects that nobody needs but that are younger than the grace; the next prune takes them.
    """

    kept: list[str] = field(default_factory=list)
    manifests: list[str] = field(default_factory=list)
    chunks: list[str] = field(default_factory=list)
    lineage: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    young: int = 0


async def prune(
    store: ObjectStore,
    job: str,
    keep: int,
    *,
    dry_run: bool = False,
    grace_seconds: float = 600.0,
    with_lineage: bool = True,
    clock: Clock | None = None,
) -> Pruned:
    """Keeps the newest `keep` of the head's chain: at least two, so that a fallback is left.

    with_lineage: also takes lineage chunks of failed saves; costs one read a checkpoint that the job ever made, so a
        trainer that prunes after each save leaves it out.
    Raises `Damaged` where a kept manifest cannot be read: then nothing is deleted."""
    if keep < 2:
        raise SettingError("at least 2 checkpoints are kept: the head, and one to fall back to", keep=keep)
    began = (clock or SystemClock()).now()
    young_since = await _young_since(store, job, began, grace_seconds)
    top = await head(store, job)
    if top is None:
        raise NotFound("the job has no checkpoint yet", job=job)
    report, kept, passed = Pruned(), dict[str, Manifest](), set[str]()
    async for ref, manifest in chain(store, top.ref):
        if len(kept) < keep:
            kept[ref.manifest] = manifest
        else:
            passed.add(ref.manifest)
    await _named(store, job, kept)

    def is_young(info: ObjectInfo) -> bool:
        return info.modified >= young_since

    async def take(info: ObjectInfo, into: list[str]) -> None:
        if not dry_run:
            fresh = await store.head(info.key)
            if fresh is None:
                return
            if info.key not in passed and is_young(fresh):
                report.young += 1
                return
            await store.delete(info.key)
        into.append(info.key)
        report.freed_bytes += info.size_bytes

    base = names.prefix(job)
    manifests = [info async for info in store.list(f"{base}manifests/")]
    going = {i.key for i in manifests if i.key not in kept and (i.key in passed or not is_young(i))}
    marked = await mark(store, job, going) if going and not dry_run else None
    await _named(store, job, kept)
    for info in manifests:
        if info.key in going - kept.keys():
            await take(info, report.manifests)
        elif info.key not in kept:
            report.young += 1
    if marked is not None:
        await store.delete(marked)
        await sweep(store, job, began)
    report.kept = list(kept)
    needed = {sha256 for manifest in kept.values() for sha256 in manifest.chunks()}
    async for info in store.list(f"{base}chunks/"):
        if info.key.rpartition("/")[2] not in needed:
            if is_young(info):
                report.young += 1
            else:
                await take(info, report.chunks)
    lines = await _lineage(store, kept.values()) if with_lineage else None
    if lines is not None:
        async for info in store.list(f"{base}lineage/"):
            if info.key.rpartition("/")[2].partition(".")[0] not in lines and not is_young(info):
                await take(info, report.lineage)
    return report


async def _young_since(store: ObjectStore, job: str, began: float, grace_seconds: float) -> float:
    """What was modified from here on (wall seconds) may be of a save that is under way."""
    saving = await store.head(names.saving(job))
    if saving is None or began - saving.modified > SAVE_SECONDS:
        return began - grace_seconds
    return min(began - grace_seconds, saving.modified)


async def _named(store: ObjectStore, job: str, kept: dict[str, Manifest]) -> None:
    """Adds what the aliases name now."""
    async for named in alias.every(store, job):
        if named.manifest not in kept:
            try:
                kept[named.manifest] = await read_manifest(store, named.ref)
            except NotFound:
                continue  # an alias of something pruned long ago keeps nothing


async def _lineage(store: ObjectStore, kept: Iterable[Manifest]) -> set[str] | None:
    """The lineage chunks of these manifests and of all before them; None where a chain is broken: then all stay."""
    found: set[str] = set()
    for manifest in kept:
        try:
            async for chunk in lineage.walk(store, manifest):
                if chunk.sha256 in found:
                    break
                found.add(chunk.sha256)
        except Damaged:
            return None
    return found
