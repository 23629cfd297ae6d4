"""Loads a checkpoint: every chunk's hash is checked; the newest that is whole is what counts.

A damaged or missing chunk of the head falls back to its parent, and so on down the chain; what was left out is
returned, so that the caller says it. A checkpoint that was asked for by name is that one or an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from megaflow_stream.checkpoint import names
from megaflow_stream.checkpoint.alias import get as get_alias
from megaflow_stream.checkpoint.head import Head, head
from megaflow_stream.checkpoint.manifest import Manifest, ManifestRef, parse, sha256_of
from megaflow_stream.checkpoint.tensor import KINDS, Kind, TensorSpec, box_begin
from megaflow_stream.errors import Damaged, NotFound
from megaflow_stream.storage.api import ObjectStore

IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that could not be loaded, and why."""

    manifest: str
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint in memory.

    tensors: each with its bytes, C order, in the manifest's order; only those of the kinds that were asked for.
    head: what the next save builds on; None where the checkpoint was asked for by key, step or alias.
    skipped: newer ones that were damaged, newest first; empty when all is well.
    """

    key: str
    manifest: Manifest
    tensors: Sequence[tuple[TensorSpec, memoryview]]
    head: Head | None
    skipped: Sequence[Skipped] = ()


async def read_manifest(store: ObjectStore, ref: ManifestRef | str) -> Manifest:
    """One manifest. Raises `NotFound` (pruned) or `Damaged`."""
    key, sha256 = (ref, None) if isinstance(ref, str) else (ref.manifest, ref.sha256)
    data, _ = await store.get(key)
    return parse(data, key=key, sha256=sha256)


async def chain(store: ObjectStore, start: ManifestRef | None) -> AsyncIterator[tuple[ManifestRef, Manifest]]:
    """The manifests from `start` to the job's first, or to where they were pruned. Raises `Damaged`."""
    ref = start
    while ref is not None:
        try:
            manifest = await read_manifest(store, ref)
        except NotFound:
            if ref is start:
                raise
            return
        yield ref, manifest
        ref = manifest.parent


async def resolve(store: ObjectStore, job: str, which: str | int | None = None) -> ManifestRef:
    """From what a person or an event names to a manifest: None or `head`, a key, a step, an alias.

    A step is looked for in the head's chain; failing that, among all manifests of the job. Raises `NotFound`."""
    if isinstance(which, str) and (parsed := names.parse_manifest(which)) is not None:
        data, _ = await store.get(which)
        return ManifestRef(which, sha256_of(data), parsed[0])
    top = await head(store, job)
    if which is None or which == "head":
        if top is None:
            raise NotFound("the job has no checkpoint yet", job=job)
        return top.ref
    if isinstance(which, str) and not which.isdigit():
        alias = await get_alias(store, job, which)
        if alias is None:
            raise NotFound(
                f"there is no checkpoint {which!r}: neither a step, a key, an alias, nor `head`",
                hint="`megaflow checkpoints list` shows what there is",
                job=job,
            )
        return alias.ref
    step = int(which)
    if top is not None and top.step >= step:
        async for ref, _ in chain(store, top.ref):
            if ref.step == step:
                return ref
            if ref.step < step:
                break
    async for info in store.list(f"{names.prefix(job)}manifests/{step:012d}-"):
        data, _ = await store.get(info.key)
        return ManifestRef(info.key, sha256_of(data), step)
    raise NotFound(
        "there is no checkpoint of this step", hint="`megaflow checkpoints list` shows the steps", job=job, step=step
    )


async def load(
    store: ObjectStore,
    job: str,
    which: str | int | None = None,
    *,
    kinds: Iterable[Kind] = KINDS,
    allocate: Callable[[TensorSpec], memoryview] | None = None,
) -> Loaded:
    """Loads the newest checkpoint that is whole (`which` None), or the one named (see `resolve`).

    kinds: which tensors; `tensor.MODEL` leaves the optimizer out, and its bytes unread.
    allocate: gives the buffer that a tensor's bytes go into, of format B; new memory by default.
    Raises `NotFound` for a job without a checkpoint, `Damaged` when none is whole.
    """
    wanted = frozenset(kinds)
    give = allocate or (lambda spec: memoryview(bytearray(spec.size_bytes)))
    if which is not None and which != "head":
        ref = await resolve(store, job, which)
        manifest = await read_manifest(store, ref)
        return Loaded(
            key=ref.manifest, manifest=manifest, tensors=await _tensors(store, manifest, wanted, give), head=None
        )
    top = await head(store, job)
    if top is None:
        raise NotFound("the job has no checkpoint yet", job=job)
    skipped: list[Skipped] = []
    next_ref: ManifestRef | None = top.ref
    while next_ref is not None:
        ref = next_ref
        try:
            manifest = await read_manifest(store, ref)
        except (Damaged, NotFound) as error:
            skipped.append(Skipped(ref.manifest, ref.step, str(error)))
            next_ref = await _before(store, job, ref)
            continue
        try:
            tensors = await _tensors(store, manifest, wanted, give)
        except Damaged as error:
            skipped.append(Skipped(ref.manifest, ref.step, str(error)))
            next_ref = manifest.parent
            continue
        base = Head(ref.manifest, ref.sha256, top.etag, ref.step)
        return Loaded(key=ref.manifest, manifest=manifest, tensors=tensors, head=base, skipped=skipped)
    raise Damaged(
        f"no checkpoint of the job is whole; {len(skipped)} were tried, the newest: {skipped[0].reason}",
        hint="`megaflow checkpoints verify` lists the damage; restore the objects, or start the job under a new name",
        job=job,
    )


async def _before(store: ObjectStore, job: str, bad: ManifestRef) -> ManifestRef | None:
    """The newest manifest below one that cannot be read, and so does not name its parent.

    One that was written but never became the head may be taken: it is whole, and what it says of offsets, state and
    lineage holds together, so that training from it repeats nothing and leaves nothing out."""
    best: ManifestRef | None = None
    async for info in store.list(f"{names.prefix(job)}manifests/"):
        parsed = names.parse_manifest(info.key)
        if parsed is None or parsed[0] >= bad.step:
            continue
        data, _ = await store.get(info.key)
        if best is None or parsed[0] >= best.step:
            best = ManifestRef(info.key, sha256_of(data), parsed[0])
    return best


async def _tensors(
    store: ObjectStore, manifest: Manifest, kinds: frozenset[Kind], allocate: Callable[[TensorSpec], memoryview]
) -> list[tuple[TensorSpec, memoryview]]:
    targets = [(t, allocate(t.spec)) for t in manifest.tensors if t.spec.kind in kinds]
    places: dict[str, list[tuple[memoryview, int, int]]] = {}
    for tensor, view in targets:
        spec = tensor.spec
        for piece in tensor.pieces:
            begin = box_begin(piece.box, spec.shape, spec.item_bytes)
            part = view[begin : begin + piece.size_bytes]
            places.setdefault(piece.sha256, []).append((part, piece.offset, piece.size_bytes))
    waiting = iter(places.items())

    async def fetch() -> None:
        for sha256, parts in waiting:
            data = await read_chunk(store, manifest.job, sha256)
            for part, offset, length in parts:
                if offset + length > len(data):
                    raise Damaged("a chunk is shorter than its manifest says", chunk=sha256)
                part[:] = data[offset : offset + length]

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(fetch())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [(tensor.spec, view) for tensor, view in targets]


async def read_chunk(store: ObjectStore, job: str, sha256: str) -> memoryview:
    """A chunk's bytes. Raises `Damaged` where they are missing or have another hash."""
    try:
        data, _ = await store.get(names.chunk(job, sha256))
    except NotFound as error:
        raise Damaged("a chunk is missing", job=job, chunk=sha256) from error
    if await asyncio.to_thread(sha256_of, data) != sha256:
        raise Damaged("a chunk's bytes do not have their hash", job=job, chunk=sha256)
    return memoryview(data)
