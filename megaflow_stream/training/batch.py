"""A micro-batch: a fixed shape of packed sequences, with what attention and loss need to keep documents apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megaflow_stream.errors import BadRecord
from megaflow_stream.features.record import PackedSequence
from megaflow_stream.features.record import positions as token_positions

PADDING_DOCUMENT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """B packed sequences of T tokens, padded at their ends; a short slice is padded with empty rows.

    tokens: int64 [B, T].
    targets: int64 [B, T]; targets[b, t] is the token after tokens[b, t], 0 at the end.
    loss_mask: bool [B, T]; whether predicting targets[b, t] counts.
    sequence_ids: int64 [B, T]; the document that a token is of, -1 for padding. Attention stays within equal ids.
    positions: int64 [B, T]; from 0 in each document.
    """

    tokens: Tensor
    targets: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor
    positions: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        return MicroBatch(**{name: getattr(self, name).to(device, non_blocking=True) for name in self.__slots__})


def micro_batch(sequences: Sequence[PackedSequence], *, rows: int, block_tokens: int) -> MicroBatch:
    """The batch [rows, block_tokens] of at most `rows` sequences of at most `block_tokens` tokens.

    Raises `BadRecord` when a sequence is longer: it was packed for another trainer."""
    if len(sequences) > rows:
        raise BadRecord(f"{len(sequences)} sequences do not fit a micro-slice of {rows}")
    sizes = [len(sequence.tokens) for sequence in sequences]
    if max(sizes, default=0) > block_tokens:
        raise BadRecord(
            f"a packed sequence has {max(sizes)} tokens, but the trainer's block_tokens is {block_tokens}",
            hint="pack the features to the trainer's block, or raise the trainer's block_tokens",
        )
    shape = (rows, block_tokens)
    tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.bool_)
    documents, positions = np.full(shape, PADDING_DOCUMENT, np.int64), np.zeros(shape, np.int64)
    if sizes:  # all rows at once: each call of numpy costs more than these few tokens
        lengths = np.concatenate([sequence.lengths for sequence in sequences])
        numbers = np.concatenate([np.arange(len(sequence.lengths)) for sequence in sequences])
        filled = np.arange(block_tokens) < np.array(sizes + [0] * (rows - len(sizes)))[:, None]
        tokens[filled] = np.concatenate([sequence.tokens for sequence in sequences])
        documents[filled] = np.repeat(numbers, lengths)
        positions[filled] = token_positions(lengths)
        mask[filled] = np.concatenate([sequence.loss_mask for sequence in sequences])
        targets[:, :-1] = tokens[:, 1:]
        mask[:, :-1] = mask[:, 1:] & (positions[:, 1:] > 0)
        mask[:, -1] = False
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        loss_mask=torch.from_numpy(mask),
        sequence_ids=torch.from_numpy(documents),
        positions=torch.from_numpy(positions),
    )
