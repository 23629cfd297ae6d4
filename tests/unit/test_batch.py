"""Micro-batches from packed sequences."""

from __future__ import annotations

import numpy as np
import pytest

from megaflow_stream.errors import BadRecord
from megaflow_stream.features.record import PackedSequence
from megaflow_stream.training.batch import micro_batch


def packed(lengths: list[int], mask: list[int] | None = None) -> PackedSequence:
    n = sum(lengths)
    return PackedSequence(
        tokens=np.arange(1, n + 1, dtype=np.uint16),
        loss_mask=np.array(mask if mask is not None else [1] * n, dtype=bool),
        lengths=np.array(lengths, dtype=np.int32),
        conversations=[f"c{i}" for i in range(len(lengths))],
        tokenizer="t",
    )


def test_targets_are_the_next_token_of_the_same_document() -> None:
    batch = micro_batch([packed([3, 2])], rows=2, block_tokens=8)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [0] * 8]
    assert batch.targets[0].tolist() == [2, 3, 4, 5, 0, 0, 0, 0]
    assert batch.loss_mask[0].tolist() == [True, True, False, True, False, False, False, False]
    assert batch.sequence_ids[0].tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]


def test_only_marked_targets_count_and_empty_rows_count_nothing() -> None:
    batch = micro_batch([packed([4], [0, 0, 1, 0])], rows=3, block_tokens=4)
    assert batch.loss_mask.sum(dim=1).tolist() == [1, 0, 0]
    assert batch.loss_mask[0].tolist() == [False, True, False, False]


def test_a_sequence_longer_than_the_block_is_refused_with_both_lengths() -> None:
    with pytest.raises(BadRecord, match=r"9 tokens.*block_tokens is 8"):
        micro_batch([packed([9])], rows=1, block_tokens=8)
    with pytest.raises(BadRecord, match="do not fit"):
        micro_batch([packed([1]), packed([1])], rows=1, block_tokens=8)
