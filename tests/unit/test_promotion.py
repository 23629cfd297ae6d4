"""Promotion: losses are compared on equal cuts only, and what cannot be compared never wins by chance."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.evaluation.promotion import Score, Verdict, decide

CUT = {"features.agent.validation/0": 10}
MOVED = {"features.agent.validation/0": 11}


def score(step: int, loss: float | None, cut: dict[str, int] | None = None, *, gone: bool = False) -> Score:
    return Score(manifest=f"m{step}", step=step, loss=loss, cut=CUT if cut is None else cut, gone=gone)


@pytest.mark.parametrize(
    ("incumbent", "candidate", "verdict", "reason"),
    [
        (None, score(1, 2.0), Verdict.PROMOTE, "first"),
        (score(1, 2.0), score(2, 1.9), Verdict.PROMOTE, "1.9000 is below the 2.0000 of step 1"),
        (score(1, 2.0), score(2, 2.0), Verdict.KEEP, "not below"),
        (score(1, 2.0), score(2, 2.1), Verdict.KEEP, "not below"),
        (score(1, 2.0), score(2, 1.9, MOVED), Verdict.AGAIN, "cut moved"),
        (score(1, 2.0), score(1, 1.9, MOVED), Verdict.KEEP, "already"),
        (score(1, None), score(2, 9.0), Verdict.PROMOTE, "step 1 has none"),
        (score(1, None), score(2, 9.0, MOVED), Verdict.AGAIN, "cut moved"),
        (None, score(1, None), Verdict.PROMOTE, "no validation records: the latest"),
        (score(1, None), score(2, None), Verdict.PROMOTE, "no validation records: the latest"),
        (score(3, None), score(2, None), Verdict.KEEP, "a later one"),
        (score(1, 2.0), score(2, None), Verdict.KEEP, "evaluated on some"),
        (None, score(1, None, gone=True), Verdict.KEEP, "gone"),
        (score(1, 2.0), score(2, None, gone=True), Verdict.KEEP, "gone"),
        (score(1, None, gone=True), score(2, 3.0), Verdict.PROMOTE, "is gone"),
        (score(1, 2.0), score(2, math.nan), Verdict.KEEP, "finite"),
        (None, score(1, math.inf), Verdict.KEEP, "finite"),
    ],
)
def test_decisions(incumbent: Score | None, candidate: Score, verdict: Verdict, reason: str) -> None:
    decision = decide(incumbent, candidate)
    assert decision.verdict is verdict
    assert reason in decision.reason


SCORES = st.builds(
    score,
    st.integers(0, 5),
    st.one_of(st.none(), st.floats(0, 9), st.just(math.nan)),
    st.sampled_from([CUT, MOVED]),
    gone=st.booleans(),
)


@given(st.one_of(st.none(), SCORES), SCORES)
def test_again_is_asked_once_at_most_and_no_worse_one_is_promoted(incumbent: Score | None, candidate: Score) -> None:
    decision = decide(incumbent, candidate)
    assert decision.reason
    if decision.verdict is Verdict.AGAIN:
        assert incumbent is not None
        again = Score(manifest=incumbent.manifest, step=incumbent.step, loss=1.0, cut=candidate.cut)
        assert decide(again, candidate).verdict is not Verdict.AGAIN
    if decision.verdict is Verdict.PROMOTE:
        assert not candidate.gone
        if incumbent is not None and not incumbent.gone and incumbent.loss is not None and candidate.loss is not None:
            assert incumbent.cut == candidate.cut
            assert not candidate.loss >= incumbent.loss
