"""The feature record: one packed sequence as an Arrow IPC stream of one row, the value of a `features.*` record.

    tokens         list<uint16> (list<uint32> for a vocabulary past 65,536): the token ids, documents end to end
    loss_mask      list<bool>, one bit a token: the token is a trained target
    lengths        list<int32>: tokens of each document
    conversations  list<string>: the conversation each document is of (a part, where it did not fit a block)

Positions and sequence ids follow from the lengths, so they are not stored: 2,048 tokens take 5.6 kB. Schema metadata:
`schema`, the version, and `tokenizer`, the SHA-256 of the tokenizer's file in hex.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megaflow_stream.errors import BadRecord

SCHEMA = "megaflow.features/1"
CONTENT_TYPE = "application/vnd.apache.arrow.stream"
_NAMES = ["tokens", "loss_mask", "lengths", "conversations"]


def _types(tokens: pa.DataType) -> list[pa.DataType]:
    return [pa.list_(tokens), pa.list_(pa.bool_()), pa.list_(pa.int32()), pa.list_(pa.string())]


_LAYOUTS = {width: pa.schema(list(zip(_NAMES, _types(width), strict=True))) for width in (pa.uint16(), pa.uint32())}
_NARROW, _WIDE = _LAYOUTS.values()
# How a message and the end of a stream are spelled (Arrow columnar format, "Encapsulated message format").
_CONTINUATION = b"\xff\xff\xff\xff"
_END = _CONTINUATION + b"\0\0\0\0"


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSequence:
    """Documents packed end to end, none padded.

    tokens: uint16 or uint32 [n], the token ids.
    loss_mask: bool [n]; loss_mask[i] says that tokens[i] is a trained target, predicted from the tokens before it in
        its own document. The first token of a document is never one.
    lengths: int32 [documents], all above 0, their sum is n.
    conversations: the conversation id of each document.
    tokenizer: SHA-256 of the tokenizer's file, in hex.

    The arrays may be read-only views of a record's bytes.
    """

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    loss_mask: NDArray[np.bool_]
    lengths: NDArray[np.int32]
    conversations: Sequence[str]
    tokenizer: str

    @property
    def trainable(self) -> int:
        """How many tokens are trained targets."""
        return int(np.count_nonzero(self.loss_mask))


def positions(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64 [n]: each token's position in its own document, from 0."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def sequence_ids(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64 [n]: the number of the document each token is of, from 0. Attention stays within equal numbers."""
    return np.repeat(np.arange(len(lengths)), lengths)


def headers(sequence: PackedSequence) -> dict[str, str]:
    """The Kafka headers of the sequence's record: a reader counts tokens without opening the value."""
    return {
        "content-type": CONTENT_TYPE,
        "schema": SCHEMA,
        "tokenizer": sequence.tokenizer,
        "tokens": str(len(sequence.tokens)),
        "trainable": str(sequence.trainable),
        "conversations": str(len(set(sequence.conversations))),
    }


def _check(sequence: PackedSequence) -> None:
    tokens, mask, lengths = sequence.tokens, sequence.loss_mask, sequence.lengths
    if len(mask) != len(tokens):
        raise BadRecord(f"not a packed sequence: {len(tokens)} tokens, but a loss mask of {len(mask)}")
    if len(sequence.conversations) != len(lengths):
        raise BadRecord(
            f"not a packed sequence: {len(lengths)} documents, but {len(sequence.conversations)} conversation ids"
        )
    sizes = lengths.tolist()
    if not sizes or min(sizes) < 1:
        raise BadRecord("not a packed sequence: it has no document, or one without a token")
    starts = [0, *accumulate(sizes)]
    if starts.pop() != len(tokens):
        raise BadRecord(f"not a packed sequence: lengths add up to {sum(sizes)}, but there are {len(tokens)} tokens")
    if any(mask[start] for start in starts):
        raise BadRecord("not a packed sequence: the first token of a document is marked as a trained target")


def encode(sequence: PackedSequence) -> bytes:
    """The record's value. Raises `BadRecord` where the parts do not fit together."""
    _check(sequence)
    layout = _WIDE if sequence.tokens.dtype == np.uint32 else _NARROW
    values = [
        pa.array(sequence.tokens, layout.field(0).type.value_type),
        pa.array(np.asarray(sequence.loss_mask, np.bool_)),
        pa.array(sequence.lengths, pa.int32()),
        pa.array(sequence.conversations, pa.string()),
    ]
    row = [pa.ListArray.from_arrays(pa.array([0, len(value)], pa.int32()), value) for value in values]
    schema = layout.with_metadata({"schema": SCHEMA, "tokenizer": sequence.tokenizer})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(row, schema=schema))
    return bytes(sink.getvalue())


@lru_cache(maxsize=256)
def _layout(head: bytes) -> tuple[pa.Schema, type[np.unsignedinteger], str]:
    """The schema message that a stream begins with -> (schema, type of the tokens, tokenizer).

    All records of one tokenizer begin with the same bytes: reading them once takes 30 microseconds off each record.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(head))
    metadata = schema.metadata or {}
    if (found := metadata.get(b"schema", b"none").decode(errors="replace")) != SCHEMA:
        raise BadRecord(f"not a packed sequence: its schema is {found}, expected {SCHEMA}")
    if not (schema.equals(_NARROW) or schema.equals(_WIDE)):
        columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
        raise BadRecord(f"not a packed sequence: its columns are {columns}")
    width = np.uint16 if schema.equals(_NARROW) else np.uint32
    return schema, width, metadata.get(b"tokenizer", b"").decode(errors="replace")


def _values(column: pa.ListArray, dtype: type[np.generic]) -> tuple[NDArray[Any], int, int]:
    """The buffer under a column's only row, and where the row begins and ends in it (in bits where they are bits)."""
    validity, offsets, inner, data = column.buffers()[:4]
    if (validity is not None and column.null_count) or (inner is not None and column.values.null_count):
        raise BadRecord("not a packed sequence: it holds nulls")
    start, end = np.frombuffer(offsets, np.int32, 2).tolist()
    return np.frombuffer(data or b"", dtype), start, end


def decode(value: bytes) -> PackedSequence:
    """The sequence in a record's value; its tokens and lengths are views of `value`.

    Raises `BadRecord`, naming what is wrong, for anything that is not exactly one packed sequence.
    """
    try:
        if value[:4] != _CONTINUATION or len(value) < 16:
            raise BadRecord("not a packed sequence: not an Arrow IPC stream")
        size = 8 + int.from_bytes(value[4:8], "little")
        schema, width, tokenizer = _layout(value[:size])
        reader = pa.BufferReader(value)
        reader.seek(size)
        batch = pa.ipc.read_record_batch(reader, schema)
        if value[reader.tell() :] != _END:
            raise BadRecord("not a packed sequence: it goes on after its first batch, or is cut off")
        if batch.num_rows != 1:
            raise BadRecord(f"not a packed sequence: {batch.num_rows} rows, expected one")
        batch.validate(full=True)
        tokens, first, last = _values(batch.column(0), width)
        bits, low, high = _values(batch.column(1), np.uint8)
        lengths, begin, end = _values(batch.column(2), np.int32)
        ids = batch.column(3)
        _, left, right = _values(ids, np.uint8)
        sequence = PackedSequence(
            tokens=tokens[first:last],
            loss_mask=np.unpackbits(bits, count=high, bitorder="little")[low:].view(np.bool_),
            lengths=lengths[begin:end],
            conversations=ids.values.to_pylist()[left:right],
            tokenizer=tokenizer,
        )
        _check(sequence)
        return sequence
    except BadRecord:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError, MemoryError, OverflowError) as error:
        raise BadRecord(f"not a packed sequence: {str(error) or type(error).__name__}") from error
