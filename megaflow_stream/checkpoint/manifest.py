"""The manifest: a versioned JSON document that is the only truth about a checkpoint.

    {"format": "megaflow.checkpoint/1", "job", "step", "created_ms", "writer", "chunk_bytes",
     "parent": {"manifest", "sha256", "step"} or null,
     "tensors": [{"name", "dtype", "shape", "kind",
                  "chunks": [{"sha256", "bytes", "offset", "box": [[start...], [stop...]]}]}],
     "state": {"offsets": {"TOPIC/PARTITION": next offset}, "plan_cursor", "generation", "rng", ...},
     "lineage": {"sha256", "bytes", "rows"}, "definition": {"tokenizer", "trainer"}}

A chunk is an object named by the SHA-256 of its bytes. A piece of a tensor is `bytes` bytes from `offset` of its chunk:
big tensors are cut into several chunks, small ones share one (see `writer`). Nothing is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from megaflow_stream.checkpoint.tensor import Box, Kind, TensorSpec, box_bytes, contiguous
from megaflow_stream.errors import Damaged, MegaflowError

FORMAT = "megaflow.checkpoint/1"


@dataclass(frozen=True, slots=True)
class PieceRef:
    """A box of a tensor, and the bytes of a chunk that hold it."""

    sha256: str
    size_bytes: int
    offset: int
    box: Box


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor and its pieces, in the order of their bytes."""

    spec: TensorSpec
    pieces: Sequence[PieceRef]


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A manifest by key and hash."""

    manifest: str
    sha256: str
    step: int

    def to_json(self) -> dict[str, Any]:
        return {"manifest": self.manifest, "sha256": self.sha256, "step": self.step}


@dataclass(frozen=True, slots=True)
class LineageRef:
    """The chunk (Parquet) that says which records were trained since the parent."""

    sha256: str
    size_bytes: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint. `chunks` maps each of its chunk's hashes to its size in bytes."""

    job: str
    step: int
    created_ms: int
    writer: str
    parent: ManifestRef | None
    tensors: Sequence[Tensor]
    state: Mapping[str, Any]
    lineage: LineageRef
    chunk_bytes: int = 8 << 20
    definition: Mapping[str, str] = field(default_factory=dict)

    @property
    def offsets(self) -> Mapping[str, int]:
        """TOPIC/PARTITION -> the next offset to train."""
        return cast(Mapping[str, int], self.state["offsets"])

    def chunks(self, kinds: Iterable[Kind] | None = None) -> dict[str, int]:
        """SHA-256 -> bytes of the chunks of the tensors of these kinds; all of them by default."""
        wanted = None if kinds is None else frozenset(kinds)
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            if wanted is None or tensor.spec.kind in wanted:
                for piece in tensor.pieces:
                    sizes[piece.sha256] = max(sizes.get(piece.sha256, 0), piece.offset + piece.size_bytes)
        return sizes

    def to_bytes(self) -> bytes:
        """The document; its SHA-256 names it."""
        return orjson.dumps(
            {
                "format": FORMAT,
                "job": self.job,
                "step": self.step,
                "created_ms": self.created_ms,
                "writer": self.writer,
                "chunk_bytes": self.chunk_bytes,
                "parent": self.parent.to_json() if self.parent else None,
                "definition": dict(self.definition),
                "state": dict(self.state),
                "lineage": {
                    "sha256": self.lineage.sha256,
                    "bytes": self.lineage.size_bytes,
                    "rows": self.lineage.rows,
                },
                "tensors": [_tensor_json(tensor) for tensor in self.tensors],
            }
        )


def check_offsets(state: Mapping[str, Any]) -> None:
    """Raises where a state does not say, for at least one partition, which offset is trained next."""
    offsets = state.get("offsets")
    if not isinstance(offsets, Mapping) or not offsets:
        raise MegaflowError("a checkpoint without offsets cannot be resumed: state.offsets is missing or empty")
    for name, offset in offsets.items():
        topic, slash, partition = str(name).rpartition("/")
        if not (slash and topic and partition.isdigit()):
            raise MegaflowError("an offset is saved under TOPIC/PARTITION", name=name)
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise MegaflowError(f"a saved offset is a number from 0, not {offset!r}", name=name)


def sha256_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def parse(data: bytes, *, key: str, sha256: str | None = None) -> Manifest:
    """Reads a manifest. Raises `Damaged` where its hash is another, or where it does not hold together."""
    actual = sha256_of(data)
    stem = key.rpartition("/")[2].partition(".")[0]
    if (sha256 is not None and actual != sha256) or not stem.endswith(actual[:8]):
        raise Damaged("the manifest's bytes do not have their hash", manifest=key, sha256=actual)
    try:
        raw = orjson.loads(data)
        if raw["format"] != FORMAT:
            raise MegaflowError(
                f"the manifest has the format {raw['format']!r}; this version reads {FORMAT}",
                hint="use the version of megaflow-stream that wrote it, or a newer one",
                manifest=key,
            )
        parent, lineage = raw["parent"], raw["lineage"]
        manifest = Manifest(
            job=raw["job"],
            step=raw["step"],
            created_ms=raw["created_ms"],
            writer=raw["writer"],
            chunk_bytes=raw["chunk_bytes"],
            parent=ManifestRef(parent["manifest"], parent["sha256"], parent["step"]) if parent else None,
            tensors=[_tensor(item) for item in raw["tensors"]],
            state=raw["state"],
            lineage=LineageRef(lineage["sha256"], lineage["bytes"], lineage["rows"]),
            definition=raw["definition"],
        )
        check_offsets(manifest.state)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"the manifest does not hold together: {type(error).__name__}: {error}", manifest=key) from error
    except MegaflowError as error:
        error.where.setdefault("manifest", key)
        raise
    for tensor in manifest.tensors:
        _check_cover(tensor, key)
    return manifest


def _check_cover(tensor: Tensor, key: str) -> None:
    """The pieces cover the tensor without gap: together its size, each contiguous, each as long as its box."""
    spec, covered = tensor.spec, 0
    for piece in tensor.pieces:
        if len(piece.box.start) != len(spec.shape) or not contiguous(piece.box, spec.shape):
            raise Damaged("a piece's box does not fit its tensor", manifest=key, tensor=spec.name)
        if box_bytes(piece.box, spec.item_bytes) != piece.size_bytes:
            raise Damaged("a piece does not have the bytes of its box", manifest=key, tensor=spec.name)
        covered += piece.size_bytes
    if covered != spec.size_bytes:
        raise Damaged(
            f"the pieces hold {covered} bytes of a tensor of {spec.size_bytes}", manifest=key, tensor=spec.name
        )


def _tensor_json(tensor: Tensor) -> dict[str, Any]:
    spec = tensor.spec
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "kind": spec.kind,
        "chunks": [
            {
                "sha256": piece.sha256,
                "bytes": piece.size_bytes,
                "offset": piece.offset,
                "box": [list(piece.box.start), list(piece.box.stop)],
            }
            for piece in tensor.pieces
        ],
    }


def _tensor(raw: Mapping[str, Any]) -> Tensor:
    return Tensor(
        TensorSpec(raw["name"], raw["dtype"], tuple(raw["shape"]), raw["kind"]),
        [
            PieceRef(c["sha256"], c["bytes"], c["offset"], Box(tuple(c["box"][0]), tuple(c["box"][1])))
            for c in raw["chunks"]
        ],
    )
