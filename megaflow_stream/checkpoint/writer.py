"""Saves a checkpoint: chunks, then the manifest, then the head.

    0. A mark, `saving.json`: `prune` spares every object written since then, however long the save takes.
    1. Every chunk that the parent's manifest does not hold is uploaded, at most `IN_FLIGHT` at a time.
    2. The lineage chunk of what was trained since the parent.
    3. The manifest, If-None-Match: *.
    4. The head, If-Match on the etag that the parent had (If-None-Match for a job's first).
    5. The mark is taken away. One that a crash leaves is overwritten by the job's next save, or ends in time (`prune`).

A crash before 4 leaves the head where it was: what was uploaded is garbage that `prune` takes, or is written again. A
lost race at 4 is `Fenced`: stop. Nothing is ever changed in place but the head.

A chunk is left out only if the *parent's* manifest holds it: that one is never pruned while it is the head. A chunk
that merely lies in the bucket may be garbage that is about to go; it is written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from megaflow_stream import faults
from megaflow_stream.checkpoint import lineage, names
from megaflow_stream.checkpoint.cut import CHUNK_BYTES, Chunk, cut
from megaflow_stream.checkpoint.head import Head, move, moved
from megaflow_stream.checkpoint.manifest import (
    LineageRef,
    Manifest,
    ManifestRef,
    PieceRef,
    Tensor,
    check_offsets,
    parse,
    sha256_of,
)
from megaflow_stream.checkpoint.tensor import TensorSpec
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.errors import Fenced, MegaflowError
from megaflow_stream.storage.api import ObjectStore

IN_FLIGHT = 4
"""Chunks uploaded at a time: bounds memory to as many copies of a chunk, 32 MiB."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a job after `step`.

    tensors: each with its bytes, C order, little-endian, 1-dimensional views of format B. They are only read, and are
        not read any more once `save` has returned or raised.
    state: JSON values; `offsets` ({"TOPIC/PARTITION": next offset}) must be there.
    lineage: what was trained since the parent, a table of `lineage.SCHEMA`; None for nothing.
    fresh: the state does not come from the parent's, only its place as the head is taken (a replay from the start):
        the lineage begins anew.
    """

    step: int
    tensors: Sequence[tuple[TensorSpec, memoryview]]
    state: Mapping[str, Any]
    lineage: pa.Table | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """What the last save did: chunks and bytes that were uploaded and that the parent had already; wall seconds."""

    chunks: int = 0
    uploaded_bytes: int = 0
    reused_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Work:
    """What the uploading tasks of one save share."""

    known: Mapping[str, int]
    tensors: list[list[PieceRef]]
    done: set[str] = field(default_factory=set)
    uploaded_bytes: int = 0
    reused_bytes: int = 0
    chunks: int = 0


class CheckpointWriter:
    """Writes one job's checkpoints, one at a time.

    definition: hashes that a trainer wants to find again: {"tokenizer", "trainer"}.
    """

    def __init__(
        self,
        store: ObjectStore,
        job: str,
        *,
        definition: Mapping[str, str] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Clock | None = None,
    ) -> None:
        names.prefix(job)
        self.store, self.job, self.chunk_bytes = store, job, chunk_bytes
        self.definition = dict(definition or {})
        self.writer = secrets.token_hex(8)
        self.saved = Saved()
        self._clock = clock or SystemClock()
        self._last: Manifest | None = None
        self._last_key = ""
        self._busy = False

    async def save(self, snapshot: Snapshot, parent: Head | None) -> Head:
        """Writes a checkpoint over `parent`; returns the new head.

        Raises `Fenced` where another has moved the head since `parent` was read, `ServiceUnreachable` where the store
        does not answer: then the same call may be made again with the same parent."""
        if self._busy:
            raise MegaflowError("a checkpoint of this job is being written", job=self.job)
        self._busy = True
        try:
            return await self._save(snapshot, parent)
        finally:
            self._busy = False

    async def _save(self, snapshot: Snapshot, parent: Head | None) -> Head:
        began = time.monotonic()
        check_offsets(snapshot.state)
        views = [_checked(spec, view) for spec, view in snapshot.tensors]
        before = await self._manifest_of(parent) if parent else None
        await self.store.put(names.saving(self.job), self.writer.encode())
        work = _Work(before.chunks() if before else {}, [[] for _ in snapshot.tensors])

        # 1. Chunks.
        chunks = cut([spec for spec, _ in snapshot.tensors], self.chunk_bytes)

        async def upload() -> None:
            for chunk in chunks:
                await self._upload(chunk, views, work)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(IN_FLIGHT):
                    group.create_task(upload())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

        # 2. Lineage.
        faults.reach("checkpoint.before_lineage", step=snapshot.step)
        parquet = lineage.to_parquet(
            snapshot.lineage,
            step=snapshot.step,
            previous=before.lineage.sha256 if before and not snapshot.fresh else None,
        )
        line = LineageRef(
            sha256_of(parquet), len(parquet), 0 if snapshot.lineage is None else snapshot.lineage.num_rows
        )
        await self.store.put(names.lineage(self.job, line.sha256), parquet)

        # 3. Manifest.
        faults.reach("checkpoint.before_manifest", step=snapshot.step)
        at_ms = int(self._clock.now() * 1000)
        manifest = Manifest(
            job=self.job,
            step=snapshot.step,
            created_ms=at_ms,
            writer=f"{self.writer}-{secrets.token_hex(4)}",
            chunk_bytes=self.chunk_bytes,
            parent=parent.ref if parent else None,
            tensors=[
                Tensor(spec, sorted(found, key=lambda piece: piece.box))
                for (spec, _), found in zip(snapshot.tensors, work.tensors, strict=True)
            ],
            state=snapshot.state,
            lineage=line,
            definition=self.definition,
        )
        data = manifest.to_bytes()
        ref = ManifestRef(names.manifest(self.job, snapshot.step, sha256_of(data)), sha256_of(data), snapshot.step)
        await self.store.put(ref.manifest, data, if_none_match=True)

        # 4. Head.
        faults.reach("checkpoint.before_head", step=snapshot.step)
        try:
            new = await move(self.store, self.job, ref, parent, writer=manifest.writer, at_ms=at_ms)
        except Fenced:
            # A try before this one may have moved it, and its answer was lost in an outage: it has the same content.
            earlier = await moved(self.store, self.job, self.writer, snapshot.step)
            if earlier is None or earlier == parent:
                raise
            self._last, self.saved = None, Saved(work.chunks, work.uploaded_bytes, work.reused_bytes)
            return earlier
        faults.reach("checkpoint.after_head", step=snapshot.step)
        with contextlib.suppress(MegaflowError):  # the checkpoint is stored, whatever becomes of the mark
            await self.store.delete(names.saving(self.job))
        self._last, self._last_key = manifest, ref.manifest
        self.saved = Saved(work.chunks, work.uploaded_bytes, work.reused_bytes, time.monotonic() - began)
        return new

    async def _upload(self, chunk: Chunk, views: Sequence[memoryview], work: _Work) -> None:
        parts = [views[tensor][piece.begin : piece.end] for tensor, piece in chunk.pieces]
        sha256 = await asyncio.to_thread(_hash, parts)
        offset = 0
        for tensor, piece in chunk.pieces:
            length = piece.end - piece.begin
            work.tensors[tensor].append(PieceRef(sha256, length, offset, piece.box))
            offset += length
        if sha256 in work.known:
            work.reused_bytes += chunk.size_bytes
        elif sha256 not in work.done:
            work.done.add(sha256)
            faults.reach("checkpoint.before_chunk", job=self.job)
            await self.store.put(names.chunk(self.job, sha256), parts[0] if len(parts) == 1 else b"".join(parts))
            work.uploaded_bytes += chunk.size_bytes
            work.chunks += 1

    async def _manifest_of(self, parent: Head) -> Manifest:
        if self._last is None or self._last_key != parent.manifest:
            data, _ = await self.store.get(parent.manifest)
            self._last = parse(data, key=parent.manifest, sha256=parent.sha256)
            self._last_key = parent.manifest
        return self._last


def _checked(spec: TensorSpec, view: memoryview) -> memoryview:
    flat = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    if flat.nbytes != spec.size_bytes:
        raise MegaflowError(
            f"a tensor of {spec.dtype} {list(spec.shape)} has {spec.size_bytes} bytes, not {flat.nbytes}",
            tensor=spec.name,
        )
    return flat


def _hash(parts: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
