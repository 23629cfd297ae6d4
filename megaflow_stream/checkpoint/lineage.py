"""Lineage: which records made a checkpoint, in immutable chunks that outlive Kafka's retention.

Each checkpoint has one Parquet chunk of what was trained since its parent:

    conversation  string, its id
    topic         string, of the packed sequence
    partition     int32
    offset        int64
    step          int64, the step that trained it

A packed sequence of several conversations is several rows. The chunk's own metadata names the lineage chunk before it
(`megaflow.previous`), so that the chain is whole also where the manifests in between were pruned.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megaflow_stream.checkpoint import names
from megaflow_stream.checkpoint.manifest import Manifest, sha256_of
from megaflow_stream.errors import Damaged, NotFound
from megaflow_stream.storage.api import ObjectStore

SCHEMA = pa.schema(
    [
        ("conversation", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("step", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class LineageChunk:
    """One chunk as read. step: of the checkpoint that wrote it; rows: a table of `SCHEMA`."""

    sha256: str
    step: int
    previous: str | None
    rows: pa.Table


def to_parquet(rows: pa.Table | None, *, step: int, previous: str | None) -> bytes:
    """A lineage chunk's bytes; None for nothing trained."""
    table = SCHEMA.empty_table() if rows is None else rows.select(SCHEMA.names).cast(SCHEMA)
    table = table.replace_schema_metadata({"megaflow.step": str(step), "megaflow.previous": previous or ""})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=["topic"])
    return bytes(sink.getvalue())


def from_parquet(data: bytes, sha256: str) -> LineageChunk:
    """Reads a chunk. Raises `Damaged` where its bytes have another hash."""
    if sha256_of(data) != sha256:
        raise Damaged("the lineage chunk's bytes do not have their hash", chunk=sha256)
    table = pq.read_table(pa.BufferReader(data))
    said = table.schema.metadata or {}
    return LineageChunk(
        sha256,
        int(said.get(b"megaflow.step", b"0")),
        said.get(b"megaflow.previous", b"").decode() or None,
        table.replace_schema_metadata(None),
    )


async def read(store: ObjectStore, job: str, sha256: str) -> LineageChunk:
    """One chunk. Raises `Damaged` where it is missing or has another hash."""
    try:
        data, _ = await store.get(names.lineage(job, sha256))
    except NotFound as error:
        raise Damaged("a lineage chunk is missing", job=job, chunk=sha256) from error
    return from_parquet(data, sha256)


async def walk(store: ObjectStore, manifest: Manifest) -> AsyncIterator[LineageChunk]:
    """The lineage of a checkpoint, newest chunk first, down to the job's first; one chunk in memory at a time."""
    sha256: str | None = manifest.lineage.sha256
    while sha256 is not None:
        chunk = await read(store, manifest.job, sha256)
        yield chunk
        sha256 = chunk.previous


async def of_checkpoint(store: ObjectStore, manifest: Manifest) -> pa.Table:
    """Every record that made a checkpoint, in the order of steps: a table of `SCHEMA`."""
    tables = [chunk.rows async for chunk in walk(store, manifest)]
    table = pa.concat_tables(reversed(tables))
    return table.sort_by(
        [("step", "ascending"), ("topic", "ascending"), ("partition", "ascending"), ("offset", "ascending")]
    )


@dataclass(frozen=True, slots=True)
class Trained:
    """A record that carried a conversation, the step that trained it, the first checkpoint (by step) that holds it."""

    topic: str
    partition: int
    offset: int
    step: int
    checkpoint_step: int


async def of_conversation(store: ObjectStore, manifest: Manifest, conversation: str) -> list[Trained]:
    """Where a conversation was trained, oldest first; empty where the checkpoint's lineage does not have it."""
    found: list[Trained] = []
    async for chunk in walk(store, manifest):
        rows = chunk.rows.filter(pc.equal(chunk.rows["conversation"], conversation))
        found += [
            Trained(row["topic"], row["partition"], row["offset"], row["step"], chunk.step) for row in rows.to_pylist()
        ]
    return sorted(found, key=lambda t: (t.step, t.topic, t.partition, t.offset))
