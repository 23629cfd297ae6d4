"""A planned slice is opened, or what is wrong in it is named with its place."""

from __future__ import annotations

import numpy as np
import pytest

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.errors import BadRecord
from megaflow_stream.features.record import PackedSequence, encode
from megaflow_stream.training.loader import Fetched
from megaflow_stream.training.plan import Slice
from megaflow_stream.training.slice import open_slice

PLACE = Slice(TopicPartition("features.x", 3), 10, 12)


def trainer(vocabulary: int | None = None, block_tokens: int = 8) -> Trainer:
    return Trainer(
        name="t",
        data="features.x",
        validation="v",
        tokenizer="t",
        build_model=lambda: None,
        loss=lambda m, b: (None, 0),
        build_optimizer=lambda p: None,
        block_tokens=block_tokens,
        vocabulary=vocabulary,
        micro_slice=2,
    )


def value(tokens: list[int]) -> bytes:
    mask = np.ones(len(tokens), np.bool_)
    mask[0] = False
    lengths = np.array([len(tokens)], np.int32)
    return encode(
        PackedSequence(
            tokens=np.array(tokens, np.uint16), loss_mask=mask, lengths=lengths, conversations=["c"], tokenizer="ab"
        )
    )


def fetched(*values: bytes) -> Fetched:
    return Fetched(np.arange(10, 10 + len(values)), np.zeros(len(values), np.int64), list(values))


def test_a_slice_is_opened() -> None:
    sequences, batch = open_slice(PLACE, fetched(value([1, 2, 3]), value([4, 5])), trainer(6))
    assert [s.tokens.tolist() for s in sequences] == [[1, 2, 3], [4, 5]]
    assert tuple(batch.tokens.shape) == (2, 8)


@pytest.mark.parametrize(
    ("second", "declared", "said"),
    [
        (b"rubbish", trainer(), "not a packed sequence"),
        (value([1, 64]), trainer(64), "token 64, the vocabulary ends at 64"),
    ],
)
def test_a_record_that_cannot_be_trained_is_named(second: bytes, declared: Trainer, said: str) -> None:
    with pytest.raises(BadRecord, match=rf"{said}.*\(topic features.x, partition 3, offset 11\)"):
        open_slice(PLACE, fetched(value([1, 2]), second), declared)


def test_a_sequence_of_another_block_is_named_by_its_slice() -> None:
    with pytest.raises(BadRecord, match=r"3 tokens.*offset 10") as error:
        open_slice(PLACE, fetched(value([1, 2, 3])), trainer(block_tokens=2))
    assert "block_tokens" in error.value.hint
