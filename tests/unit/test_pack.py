"""Packing: nothing is lost but what the rule says, and what is lost is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.errors import SettingError
from megaflow_stream.features.pack import Part, best_fit_decreasing, pack, padding_tokens, split
from megaflow_stream.features.record import decode, encode, positions
from megaflow_stream.features.render import Rendered

BEGIN = 0


def rendered(turns: list[tuple[int, bool]], conversation: str = "c") -> Rendered:
    """A conversation of turns (tokens, trained). Token ids tell the place: 1, 2, 3, ..."""
    sizes = [size for size, _ in turns]
    trained = np.repeat([trained for _, trained in turns], sizes)
    return Rendered(
        conversation=conversation,
        tokens=np.concatenate([[BEGIN], np.arange(1, sum(sizes) + 1)]).astype(np.uint16),
        loss_mask=np.concatenate([[False], trained]).astype(np.bool_),
        turns=np.cumsum([1, *sizes[:-1]]).astype(np.int64),
    )


def test_what_fits_is_one_part() -> None:
    cut = split(rendered([(4, False), (5, True)]), 10)
    assert [part.tokens.tolist() for part in cut.parts] == [list(range(10))]
    assert (cut.untrainable, cut.truncated, cut.truncated_tokens) == (0, 0, 0)


def test_a_long_conversation_is_cut_at_turns() -> None:
    cut = split(rendered([(2, False), (3, True), (2, False), (4, True), (9, True)]), 10)
    assert [part.tokens.tolist() for part in cut.parts] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 8, 9, 10, 11],
        [0, *range(12, 21)],
    ]
    assert cut.parts[0].loss_mask.tolist() == [False, False, False, True, True, True, False, False]
    assert (cut.untrainable, cut.truncated) == (0, 0)


def test_a_turn_longer_than_the_block_keeps_its_beginning() -> None:
    cut = split(rendered([(2, False), (20, True), (3, True)]), 10)
    assert [part.tokens.tolist() for part in cut.parts] == [[0, *range(3, 12)], [0, 23, 24, 25]]
    assert (cut.untrainable, cut.truncated, cut.truncated_tokens) == (1, 1, 11)


def test_parts_without_a_trainable_token_are_left_out_and_counted() -> None:
    assert split(rendered([(4, False)]), 10).untrainable == 1
    cut = split(rendered([(30, False), (3, False), (4, True), (30, False)]), 10)
    assert [part.tokens.tolist() for part in cut.parts] == [[0, *range(31, 38)]]
    assert (cut.untrainable, cut.truncated, cut.truncated_tokens) == (2, 2, 42)


@given(
    turns=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=20),
    block_tokens=st.integers(2, 64),
)
def test_every_token_is_in_one_part_or_counted(turns: list[tuple[int, bool]], block_tokens: int) -> None:
    whole = rendered(turns)
    cut = split(whole, block_tokens)
    kept = [token for part in cut.parts for token in part.tokens[1:].tolist()]
    assert kept == sorted(set(kept))
    for part in cut.parts:
        assert part.tokens[0] == BEGIN
        assert not part.loss_mask[0]
        assert part.loss_mask.any()
        assert len(part.tokens) <= block_tokens
        assert np.array_equal(part.loss_mask[1:], whole.loss_mask[part.tokens[1:]])
    trained_lost = set(np.flatnonzero(whole.loss_mask).tolist()) - set(kept)
    assert len(trained_lost) <= cut.truncated_tokens
    if not cut.truncated and not cut.untrainable:
        assert kept == whole.tokens[1:].tolist()


@given(lengths=st.lists(st.integers(1, 64), max_size=60), block_tokens=st.integers(64, 100))
def test_bins_hold_each_once_and_no_more_than_fits(lengths: list[int], block_tokens: int) -> None:
    bins = best_fit_decreasing(lengths, block_tokens)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    loads = sorted(sum(lengths[index] for index in members) for members in bins)
    assert all(load <= block_tokens for load in loads)
    assert bins == sorted(sorted(members) for members in bins)
    if len(loads) > 1:  # two of the emptiest would not have fitted into one
        assert loads[0] + loads[1] > block_tokens


def test_best_fit_takes_the_tightest_bin() -> None:
    # 7 and 6 open two bins; 3 fits both, and goes to the one with room for exactly 3.
    assert best_fit_decreasing([6, 3, 7], 10) == [[0], [1, 2]]
    assert best_fit_decreasing([], 10) == []


@pytest.mark.parametrize("lengths", [[0], [11], [5, -1]])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(SettingError):
        best_fit_decreasing(lengths, 10)


def test_a_packed_sequence_is_its_parts_end_to_end() -> None:
    parts = [part for name in "abc" for part in split(rendered([(2, False), (3, True)], name), 16).parts]
    (first, second) = pack(parts, 16, "0" * 64)
    assert first.conversations == ["a", "b"]
    assert first.lengths.tolist() == [6, 6]
    assert first.tokens.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert positions(first.lengths).tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert decode(encode(first)).tokens.tolist() == first.tokens.tolist()
    assert second.conversations == ["c"]
    assert padding_tokens([first, second], 16) == 4 + 10


def test_packing_is_tight_on_lengths_like_real_ones() -> None:
    random = np.random.default_rng(7)
    sizes = np.clip(random.lognormal(4.5, 0.9, 1000), 4, 512).astype(int)
    parts = [
        Part(conversation=str(i), tokens=np.zeros(size, np.uint16), loss_mask=np.arange(size) > 0)
        for i, size in enumerate(sizes)
    ]
    sequences = pack(parts, 512, "0" * 64)
    assert padding_tokens(sequences, 512) / (512 * len(sequences)) < 0.01
