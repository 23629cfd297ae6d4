"""Cutting tensors: every byte once, at places that depend on the shape only."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.checkpoint.cut import cut
from megaflow_stream.checkpoint.tensor import TensorSpec, box_begin, box_bytes, contiguous, pieces
from megaflow_stream.errors import MegaflowError

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.integers(8, 200))
def test_pieces_cover_a_tensor_in_order_within_the_limit(shape: tuple[int, ...], item: int, limit: int) -> None:
    place = 0
    for piece in pieces(shape, item, limit):
        assert piece.begin == place
        assert 0 < piece.end - piece.begin <= limit
        assert box_bytes(piece.box, item) == piece.end - piece.begin
        assert box_begin(piece.box, shape, item) == piece.begin
        assert contiguous(piece.box, shape)
        place = piece.end
    assert place == math.prod(shape) * item


def test_a_big_matrix_is_cut_at_fixed_rows() -> None:
    found = list(pieces((10, 100), 4, 1200))
    assert [(p.box.start, p.box.stop) for p in found] == [
        ((0, 0), (3, 100)),
        ((3, 0), (6, 100)),
        ((6, 0), (9, 100)),
        ((9, 0), (10, 100)),
    ]


def test_a_scalar_is_one_piece() -> None:
    (piece,) = pieces((), 8, 100)
    assert piece.box.start == ()
    assert (piece.begin, piece.end) == (0, 8)


def test_a_box_that_is_no_run_of_bytes_is_known() -> None:
    from megaflow_stream.checkpoint.tensor import Box

    assert not contiguous(Box((0, 0), (2, 3)), (4, 5))
    assert contiguous(Box((1, 0), (2, 3)), (4, 5))


def test_small_tensors_share_chunks_by_kind() -> None:
    specs = [TensorSpec(f"norm{i}", "float32", (64,), "trainable") for i in range(300)]
    specs += [TensorSpec(f"frozen{i}", "float32", (64,), "frozen") for i in range(300)]
    specs += [TensorSpec("big", "float32", (1024, 1024), "trainable")]
    chunks = list(cut(specs))
    assert len(chunks) == 3
    for chunk in chunks:
        assert len({specs[tensor].kind for tensor, _ in chunk.pieces}) == 1
    assert sum(chunk.size_bytes for chunk in chunks) == sum(spec.size_bytes for spec in specs)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(["trainable", "frozen", "optimizer"])), max_size=12))
def test_every_byte_is_in_one_chunk(tensors: list[tuple[tuple[int, ...], str]]) -> None:
    specs = [TensorSpec(f"t{i}", "float32", shape, kind) for i, (shape, kind) in enumerate(tensors)]  # type: ignore[arg-type]
    covered = dict.fromkeys(range(len(specs)), 0)
    for chunk in cut(specs, chunk_bytes=256):
        assert chunk.size_bytes <= 256
        for tensor, piece in chunk.pieces:
            covered[tensor] += piece.end - piece.begin
    assert covered == {i: spec.size_bytes for i, spec in enumerate(specs)}


def test_an_unknown_dtype_or_kind_is_refused() -> None:
    with pytest.raises(MegaflowError, match="complex64"):
        TensorSpec("x", "complex64", (1,), "trainable")
    with pytest.raises(MegaflowError, match="buffer"):
        TensorSpec("x", "float32", (1,), "buffer")  # type: ignore[arg-type]
