"""A tensor as a checkpoint knows it: a name, a dtype, a shape, raw bytes. torch stays out of here.

Bytes are row-major (C order) and little-endian. `boxes` cuts a tensor into pieces that are contiguous in that order, so
that a piece is a slice of the buffer, never a copy; where it cuts depends on shape, dtype and limit only, so that an
unchanged part of a tensor is the same bytes, with the same hash, in every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from megaflow_stream.errors import MegaflowError

Kind = Literal["trainable", "frozen", "optimizer"]
KINDS: frozenset[Kind] = frozenset(get_args(Kind))
MODEL: frozenset[Kind] = frozenset(("trainable", "frozen"))

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
"""Bytes of one element, by torch's name of the dtype without `torch.`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A logical tensor.

    name: of a parameter or buffer; of optimizer state `optimizer/PARAMETER/STATE`, by name, never by index.
    dtype: a key of `ITEM_BYTES`.
    shape: the global shape; () for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise MegaflowError(
                f"a checkpoint has no dtype {self.dtype!r}; it knows {', '.join(ITEM_BYTES)}", tensor=self.name
            )
        if self.kind not in KINDS:
            raise MegaflowError(f"a tensor is {', '.join(sorted(KINDS))}, not {self.kind!r}", tensor=self.name)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


class Box(NamedTuple):
    """A part of a tensor: start (inclusive) and stop (exclusive), one number a dimension each."""

    start: tuple[int, ...]
    stop: tuple[int, ...]


class Piece(NamedTuple):
    """A box and where its bytes lie in the tensor's buffer."""

    box: Box
    begin: int
    end: int


def pieces(shape: Sequence[int], item_bytes: int, limit_bytes: int) -> Iterator[Piece]:
    """Cuts a tensor into boxes of at most `limit_bytes`, in the order of their bytes; none for an empty tensor.

    The cut is along the first dimension whose rows fit the limit; the dimensions before it are taken one at a time.
    """
    dims = tuple(shape)
    if not math.prod(dims):
        return
    axis = 0
    while axis < len(dims) and math.prod(dims[axis + 1 :]) * item_bytes > limit_bytes:
        axis += 1
    if axis >= len(dims):
        yield Piece(Box((0,) * len(dims), dims), 0, math.prod(dims) * item_bytes)
        return
    row_bytes = math.prod(dims[axis + 1 :]) * item_bytes
    rows = max(1, limit_bytes // row_bytes)
    place = 0
    for outer in range(math.prod(dims[:axis])):
        index = _unravel(outer, dims[:axis])
        for first in range(0, dims[axis], rows):
            last = min(first + rows, dims[axis])
            box = Box(
                (*index, first) + (0,) * (len(dims) - axis - 1),
                (*(i + 1 for i in index), last, *dims[axis + 1 :]),
            )
            length = (last - first) * row_bytes
            yield Piece(box, place, place + length)
            place += length


def box_bytes(box: Box, item_bytes: int) -> int:
    """Bytes of a box."""
    return math.prod(stop - start for start, stop in zip(box.start, box.stop, strict=True)) * item_bytes


def box_begin(box: Box, shape: Sequence[int], item_bytes: int) -> int:
    """Where the bytes of a box begin in the tensor's buffer."""
    place = 0
    for start, size in zip(box.start, shape, strict=True):
        place = place * size + start
    return place * item_bytes


def contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Whether the box's bytes are one run of the tensor's buffer."""
    lengths = [stop - start for start, stop in zip(box.start, box.stop, strict=True)]
    axis = next((i for i, n in enumerate(lengths) if n != 1), len(lengths))
    return all(n == size for n, size in zip(lengths[axis + 1 :], shape[axis + 1 :], strict=True))


def _unravel(number: int, dims: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(dims):
        number, rest = divmod(number, size)
        index.append(rest)
    return tuple(reversed(index))
