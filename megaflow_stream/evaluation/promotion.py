"""Which checkpoint is the best: a pure function of two evaluations.

Losses are compared on equal cuts only. Where the cut moved since the incumbent was evaluated, the answer is to evaluate
it again, not to guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Score:
    """A checkpoint's evaluation.

    manifest: its key. loss: nats per trainable token; None where there was nothing to evaluate on.
    cut: TOPIC/PARTITION -> end offset. gone: its weights cannot be had any more (pruned, damaged, of another model).
    """

    manifest: str
    step: int
    loss: float | None = None
    cut: Mapping[str, int] = field(default_factory=dict)
    gone: bool = False


class Verdict(Enum):
    """What to do: move the alias to the candidate, leave it, or first evaluate the incumbent at the candidate's cut."""

    PROMOTE = "promote"
    KEEP = "keep"
    AGAIN = "evaluate the incumbent again"


@dataclass(frozen=True)
class Decision:
    """A verdict and its reason, in words for a person."""

    verdict: Verdict
    reason: str


def decide(incumbent: Score | None, candidate: Score) -> Decision:
    """Whether `candidate` takes the place of `incumbent`. Never AGAIN where the cuts are equal or either is gone."""
    if candidate.gone:
        return Decision(Verdict.KEEP, "gone")
    if candidate.loss is not None and not math.isfinite(candidate.loss):
        return Decision(Verdict.KEEP, "the validation loss is not a finite number")
    if incumbent is None:
        if candidate.loss is None:
            return Decision(Verdict.PROMOTE, "no validation records: the latest is promoted")
        return Decision(Verdict.PROMOTE, "the first that was evaluated")
    if incumbent.manifest == candidate.manifest:
        return Decision(Verdict.KEEP, "promoted already")
    if incumbent.gone:
        return Decision(Verdict.PROMOTE, f"the promoted one, step {incumbent.step}, is gone")
    if candidate.loss is None:
        if incumbent.loss is not None:
            return Decision(Verdict.KEEP, "no validation records, and the promoted one was evaluated on some")
        if candidate.step < incumbent.step:
            return Decision(Verdict.KEEP, "no validation records, and a later one is promoted")
        return Decision(Verdict.PROMOTE, "no validation records: the latest is promoted")
    if incumbent.cut != candidate.cut:
        return Decision(Verdict.AGAIN, f"the cut moved since step {incumbent.step} was evaluated")
    if incumbent.loss is None or not math.isfinite(incumbent.loss):
        return Decision(Verdict.PROMOTE, f"the first with a validation loss; step {incumbent.step} has none")
    if candidate.loss < incumbent.loss:
        return Decision(
            Verdict.PROMOTE, f"{candidate.loss:.4f} is below the {incumbent.loss:.4f} of step {incumbent.step}"
        )
    return Decision(
        Verdict.KEEP, f"{candidate.loss:.4f} is not below the {incumbent.loss:.4f} of step {incumbent.step}"
    )
