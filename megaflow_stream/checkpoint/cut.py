"""How tensors become chunks: big ones are cut, small ones share.

A tensor of `PACK_BYTES` or more is cut by itself into chunks of at most `chunk_bytes` (`tensor.pieces`). Smaller ones
are laid one behind another, in the order given, into chunks of at most `chunk_bytes` that hold one kind only: hundreds
of norms and biases are one object, frozen ones stay apart from trained ones, and a model loads without its optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megaflow_stream.checkpoint.tensor import Kind, Piece, TensorSpec, pieces

CHUNK_BYTES = 8 << 20
PACK_BYTES = 1 << 20


@dataclass(slots=True)
class Chunk:
    """Pieces that become one object, one behind another.

    pieces: (index of the tensor in the snapshot, its piece).
    """

    pieces: list[tuple[int, Piece]] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, tensor: int, piece: Piece) -> None:
        self.pieces.append((tensor, piece))
        self.size_bytes += piece.end - piece.begin


def cut(specs: Sequence[TensorSpec], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The chunks of these tensors. The same specs give the same chunks."""
    pack_bytes = min(PACK_BYTES, chunk_bytes)
    packs: dict[Kind, Chunk] = {}
    for index, spec in enumerate(specs):
        small = spec.size_bytes < pack_bytes
        for piece in pieces(spec.shape, spec.item_bytes, chunk_bytes):
            if not small:
                chunk = Chunk()
                chunk.add(index, piece)
                yield chunk
                continue
            pack = packs.setdefault(spec.kind, Chunk())
            if pack.size_bytes + spec.size_bytes > chunk_bytes:
                yield pack
                pack = packs[spec.kind] = Chunk()
            pack.add(index, piece)
    yield from packs.values()
