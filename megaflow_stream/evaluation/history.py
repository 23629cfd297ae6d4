"""The topic `evaluations`: what an evaluator has said so far, which is what is true after a restart.

One record an evaluation:

    {"job", "evaluation", "step", "manifest", "manifest_sha256", "cut": {"TOPIC/P": end offset},
     "validation_records", "validation_tokens", "validation_loss": nats per token or null, "perplexity": or null,
     "best": whether this checkpoint is the promoted one from here on, "reason", "at_ms"}

A trainer whose evaluator's policy is `sync` waits for a record with its manifest's key before its next interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from megaflow_stream.bus.api import Bus
from megaflow_stream.checkpoint.manifest import ManifestRef
from megaflow_stream.evaluation.evaluate import Measured
from megaflow_stream.evaluation.promotion import Score
from megaflow_stream.observe.scan import scan


@dataclass(frozen=True, kw_only=True)
class Result:
    """One record of the topic."""

    job: str
    evaluation: str
    checkpoint: ManifestRef
    cut: dict[str, int]
    measured: Measured
    best: bool
    reason: str
    at_ms: int
    gone: bool = False

    @property
    def score(self) -> Score:
        return Score(
            manifest=self.checkpoint.manifest,
            step=self.checkpoint.step,
            loss=self.measured.loss,
            cut=self.cut,
            gone=self.gone,
        )

    def to_json(self) -> bytes:
        """A loss or perplexity that is no finite number is null, as JSON has no other word; the reason says it."""
        return orjson.dumps(
            {
                "job": self.job,
                "evaluation": self.evaluation,
                "step": self.checkpoint.step,
                "manifest": self.checkpoint.manifest,
                "manifest_sha256": self.checkpoint.sha256,
                "cut": self.cut,
                "validation_records": self.measured.records,
                "validation_tokens": self.measured.tokens,
                "validation_loss": self.measured.loss,
                "perplexity": self.measured.perplexity,
                "bad_records": self.measured.bad,
                "gone": self.gone,
                "best": self.best,
                "reason": self.reason,
                "at_ms": self.at_ms,
            }
        )


def parse(value: bytes) -> Result:
    """Raises ValueError, KeyError or TypeError for anything else."""
    raw: dict[str, Any] = orjson.loads(value)
    return Result(
        job=raw["job"],
        evaluation=raw["evaluation"],
        checkpoint=ManifestRef(raw["manifest"], raw["manifest_sha256"], int(raw["step"])),
        cut=raw["cut"],
        measured=Measured(
            records=raw["validation_records"],
            bad=raw.get("bad_records", 0),
            tokens=raw["validation_tokens"],
            loss=raw["validation_loss"],
        ),
        best=raw["best"],
        reason=raw["reason"],
        at_ms=raw["at_ms"],
        gone=raw.get("gone", False),
    )


async def read(bus: Bus, topic: str, job: str, evaluation: str) -> list[Result]:
    """Every result of one evaluation of a job, oldest first; others, and what is no result, are passed over."""
    found = []
    async for record in scan(bus, topic):
        try:
            result = parse(record.value or b"")
        except (ValueError, KeyError, TypeError):
            continue
        if (result.job, result.evaluation) == (job, evaluation):
            found.append(result)
    return found


async def promoted(bus: Bus, topic: str, job: str, evaluation: str) -> Result | None:
    """The newest result of the checkpoint that is promoted by now; None before the first."""
    best: Result | None = None
    for result in await read(bus, topic, job, evaluation):
        if result.best:
            best = result
    return best
