"""The feature record: what goes in comes out, it is small, and anything else is refused by name."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.errors import BadRecord
from megaflow_stream.features.record import (
    PackedSequence,
    decode,
    encode,
    headers,
    positions,
    sequence_ids,
)


def sequence(lengths: list[int], *, wide: bool = False, seed: int = 0) -> PackedSequence:
    random = np.random.default_rng(seed)
    n = sum(lengths)
    mask = random.random(n) < 0.4
    mask[np.cumsum([0, *lengths[:-1]])] = False
    return PackedSequence(
        tokens=random.integers(0, 100_000 if wide else 4096, n).astype(np.uint32 if wide else np.uint16),
        loss_mask=mask,
        lengths=np.array(lengths, np.int32),
        conversations=[f"{i:016x}" for i in range(len(lengths))],
        tokenizer="0123456789abcdef" * 4,
    )


def same(one: PackedSequence, other: PackedSequence) -> bool:
    return (
        one.tokens.dtype == other.tokens.dtype
        and np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.loss_mask, other.loss_mask)
        and np.array_equal(one.lengths, other.lengths)
        and list(one.conversations) == list(other.conversations)
        and one.tokenizer == other.tokenizer
    )


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12), wide=st.booleans(), seed=st.integers(0, 99))
def test_what_is_encoded_is_decoded(lengths: list[int], wide: bool, seed: int) -> None:
    made = sequence(lengths, wide=wide, seed=seed)
    found = decode(encode(made))
    assert same(found, made)
    assert found.loss_mask.dtype == np.bool_
    assert encode(found) == encode(made)


def test_2048_tokens_take_under_5700_bytes() -> None:
    # 4,096 bytes of tokens, 256 of mask bits; the rest is Arrow's schema and the tokenizer's hash.
    assert len(encode(sequence([700, 600, 500, 248]))) < 5_700
    assert len(encode(sequence([2048], wide=True))) < 5_700 + 4_096


def test_any_arrow_reader_reads_it() -> None:
    made = sequence([3, 2])
    table = pa.ipc.open_stream(encode(made)).read_all()
    assert table.schema.metadata == {b"schema": b"megaflow.features/1", b"tokenizer": made.tokenizer.encode()}
    (row,) = table.to_pylist()
    assert row == {
        "tokens": made.tokens.tolist(),
        "loss_mask": made.loss_mask.tolist(),
        "lengths": [3, 2],
        "conversations": ["0" * 16, "0" * 15 + "1"],
    }


def test_a_record_of_another_arrow_writer_is_read() -> None:
    """A sliced list, whose row does not begin at 0 of its buffers."""
    made = sequence([3, 2])
    columns = pa.ipc.open_stream(encode(made)).read_all()
    doubled = pa.concat_tables([columns, columns]).combine_chunks().slice(1, 1)
    assert same(decode(_stream(doubled.to_batches()[0])), made)


def test_positions_and_sequence_ids_follow_from_lengths() -> None:
    lengths = np.array([3, 1, 2], np.int32)
    assert positions(lengths).tolist() == [0, 1, 2, 0, 0, 1]
    assert sequence_ids(lengths).tolist() == [0, 0, 0, 1, 2, 2]
    assert positions(np.array([], np.int32)).tolist() == []


def test_headers_count_without_opening_the_value() -> None:
    made = sequence([300, 200])
    assert headers(made) == {
        "content-type": "application/vnd.apache.arrow.stream",
        "schema": "megaflow.features/1",
        "tokenizer": made.tokenizer,
        "tokens": "500",
        "trainable": str(int(made.loss_mask.sum())),
        "conversations": "2",
    }


def _stream(batch: pa.RecordBatch, batches: int = 1) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def _batch(**changed: pa.Array) -> pa.RecordBatch:
    batch = pa.ipc.open_stream(encode(sequence([3, 2]))).read_next_batch()
    for name, array in changed.items():
        batch = batch.set_column(batch.schema.get_field_index(name), name, array)
    return batch


def _list(value: list[object] | None, kind: pa.DataType) -> pa.Array:
    return pa.array([value], pa.list_(kind))


WRONG = {
    "empty": (b"", "not an Arrow IPC stream"),
    "json": (b'{"tokens": [1, 2, 3], "x": 1}', "not an Arrow IPC stream"),
    "cut in the schema": (encode(sequence([3, 2]))[:200], "."),
    "cut in the batch": (encode(sequence([300]))[:-300], "."),
    "no end": (encode(sequence([3, 2]))[:-8], "cut off"),
    "more behind": (encode(sequence([3, 2])) + b"x", "goes on"),
    "two batches": (_stream(_batch(), 2), "goes on"),
    "no row": (_stream(_batch().slice(0, 0)), "0 rows"),
    "another schema": (_stream(_batch().replace_schema_metadata({"schema": "megaflow.features/9"})), "features/9"),
    "no schema": (_stream(_batch().replace_schema_metadata(None)), "its schema is none"),
    "another column": (_stream(_batch(tokens=_list([1, 2, 3, 4, 5], pa.int64()))), "tokens: list<item: int64>"),
    "a column less": (_stream(_batch().select(["tokens", "loss_mask", "lengths"])), "its columns are"),
    "null row": (_stream(_batch(tokens=_list(None, pa.uint16()))), "null"),
    "null token": (_stream(_batch(tokens=_list([1, None, 3, 4, 5], pa.uint16()))), "null"),
    "null id": (_stream(_batch(conversations=_list(["a", None], pa.string()))), "null"),
    "lengths": (_stream(_batch(lengths=_list([3, 3], pa.int32()))), "lengths add up to 6"),
    "zero length": (_stream(_batch(lengths=_list([5, 0], pa.int32()))), "without a token"),
    "no document": (
        _stream(_batch(lengths=_list([], pa.int32()), conversations=_list([], pa.string()))),
        "no document",
    ),
    "mask": (_stream(_batch(loss_mask=_list([False, True], pa.bool_()))), "loss mask of 2"),
    "ids": (_stream(_batch(conversations=_list(["a"], pa.string()))), "1 conversation ids"),
    "first token": (_stream(_batch(loss_mask=_list([False, True, True, True, True], pa.bool_()))), "first token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_anything_else_is_refused_by_name(case: str) -> None:
    value, message = WRONG[case]
    with pytest.raises(BadRecord, match=message):
        decode(value)


@given(place=st.integers(0, 899), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_gives_a_sound_sequence(place: int, bit: int) -> None:
    """Kafka's own checksum finds these; a reader must survive them all the same."""
    value = bytearray(encode(sequence([20, 10])))
    value[place % len(value)] ^= 1 << bit
    try:
        found = decode(bytes(value))
    except BadRecord:
        return
    assert found.lengths.sum() == len(found.tokens) == len(found.loss_mask)


def test_parts_that_do_not_fit_are_not_encoded() -> None:
    made = sequence([3, 2])
    with pytest.raises(BadRecord, match="loss mask"):
        encode(
            PackedSequence(
                tokens=made.tokens,
                loss_mask=made.loss_mask[:3],
                lengths=made.lengths,
                conversations=made.conversations,
                tokenizer=made.tokenizer,
            )
        )
