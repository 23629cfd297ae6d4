"""Rendered conversations -> packed sequences. Pure functions.

The rule for what does not fit: a conversation longer than the block is cut at turn boundaries into consecutive parts,
each as many whole turns as fit behind a `<|begin|>` of its own; a single turn longer than that keeps its first tokens,
and the rest is lost and counted. A part without a trainable token teaches nothing and is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_stream.errors import SettingError
from megaflow_stream.features.record import PackedSequence
from megaflow_stream.features.render import Rendered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A piece of a conversation that fits a block: tokens [n], loss_mask [n], n <= block_tokens."""

    conversation: str
    tokens: NDArray[Any]
    loss_mask: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What became of one conversation.

    parts: in order; none without a trainable token.
    untrainable: parts that had none and were left out.
    truncated: turns that lost their end; truncated_tokens: how many tokens they lost.
    """

    parts: Sequence[Part]
    untrainable: int = 0
    truncated: int = 0
    truncated_tokens: int = 0


def split(rendered: Rendered, block_tokens: int) -> Split:
    """Cuts a conversation into parts of at most `block_tokens`, by the rule of this module."""
    if block_tokens < 2:
        raise SettingError(f"a block holds a begin token and one more at least, not {block_tokens}")
    tokens, mask = rendered.tokens, rendered.loss_mask
    if len(tokens) <= block_tokens:
        if not mask.any():
            return Split(parts=(), untrainable=1)
        return Split(parts=(Part(conversation=rendered.conversation, tokens=tokens, loss_mask=mask),))
    room = block_tokens - 1
    parts: list[Part] = []
    untrainable = truncated = lost = 0
    starts = rendered.turns.tolist()
    ends = [*starts[1:], len(tokens)]
    turn = 0
    while turn < len(starts):
        first = starts[turn]
        turn += 1
        while turn < len(starts) and ends[turn] - first <= room:
            turn += 1
        last = ends[turn - 1]
        if last - first > room:
            truncated += 1
            lost += last - first - room
            last = first + room
        if mask[first:last].any():
            parts.append(
                Part(
                    conversation=rendered.conversation,
                    tokens=np.concatenate([tokens[:1], tokens[first:last]]),
                    loss_mask=np.concatenate([mask[:1], mask[first:last]]),
                )
            )
        else:
            untrainable += 1
    return Split(parts=parts, untrainable=untrainable, truncated=truncated, truncated_tokens=lost)


def best_fit_decreasing(lengths: Sequence[int], block_tokens: int) -> list[list[int]]:
    """Bins of indices of `lengths`, each bin's sum at most `block_tokens` (Johnson 1973: at most 11/9 of the best).

    The longest first, each into the fullest bin it fits; equal ones in their order. Indices in a bin ascend, and bins
    are in the order of their first: packing keeps the order of the stream as far as it can. Lengths are 1 to
    block_tokens, else `SettingError`.
    """
    if lengths and not 0 < min(lengths) <= max(lengths) <= block_tokens:
        raise SettingError(f"lengths of {min(lengths)} to {max(lengths)} do not fit blocks of {block_tokens}")
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a bin with r tokens of room exists: the tightest is the lowest bit from a length up
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            place = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, place = block_tokens, len(bins)
            bins.append([])
        bins[place].append(index)
        if left := room - length:
            by_room.setdefault(left, []).append(place)
            rooms |= 1 << left
    for members in bins:
        members.sort()
    return sorted(bins)


def pack(parts: Sequence[Part], block_tokens: int, tokenizer: str) -> list[PackedSequence]:
    """Packs parts by best fit decreasing; padding is not stored: a reader pads to the block."""
    out = []
    for members in best_fit_decreasing([len(part.tokens) for part in parts], block_tokens):
        chosen = [parts[index] for index in members]
        out.append(
            PackedSequence(
                tokens=np.concatenate([part.tokens for part in chosen]),
                loss_mask=np.concatenate([part.loss_mask for part in chosen]),
                lengths=np.array([len(part.tokens) for part in chosen], np.int32),
                conversations=[part.conversation for part in chosen],
                tokenizer=tokenizer,
            )
        )
    return out


def padding_tokens(sequences: Sequence[PackedSequence], block_tokens: int) -> int:
    """How many tokens of the blocks are padding; over `len(sequences) * block_tokens` it is the padding share."""
    return len(sequences) * block_tokens - sum(len(sequence.tokens) for sequence in sequences)
