"""Reads every chunk of a checkpoint again and compares hashes; memory stays at a few chunks."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow_stream.checkpoint import lineage
from megaflow_stream.checkpoint.manifest import ManifestRef
from megaflow_stream.checkpoint.reader import read_chunk, read_manifest
from megaflow_stream.errors import Damaged, NotFound
from megaflow_stream.storage.api import ObjectStore


@dataclass(frozen=True, slots=True)
class Verified:
    """What was read, and what was wrong; no problem means that the checkpoint is whole."""

    manifest: str
    step: int
    chunks: int
    size_bytes: int
    problems: tuple[str, ...]


async def verify(store: ObjectStore, ref: ManifestRef | str, *, good: set[str] | None = None) -> Verified:
    """Verifies one checkpoint, its lineage chunk included.

    good: hashes that were read and right already; filled, so that chunks that checkpoints share are read once."""
    seen = set[str]() if good is None else good
    key = ref if isinstance(ref, str) else ref.manifest
    try:
        manifest = await read_manifest(store, ref)
    except (Damaged, NotFound) as error:
        step = 0 if isinstance(ref, str) else ref.step
        return Verified(key, step, 0, 0, (str(error),))
    problems: list[str] = []
    sizes = manifest.chunks()
    for sha256, size in sizes.items():
        if sha256 in seen:
            continue
        try:
            data = await read_chunk(store, manifest.job, sha256)
        except Damaged as error:
            problems.append(str(error))
            continue
        if len(data) < size:
            problems.append(f"chunk {sha256} has {len(data)} bytes; the manifest refers to {size}")
        else:
            seen.add(sha256)
    try:
        await lineage.read(store, manifest.job, manifest.lineage.sha256)
    except Damaged as error:
        problems.append(str(error))
    return Verified(key, manifest.step, len(sizes), sum(sizes.values()), tuple(problems))
