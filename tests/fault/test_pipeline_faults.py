"""The promise, through faults: a conversation published once has one effect on the model, whatever dies in between.

Twenty faults, with the project's own samples: every kind of process is killed and frozen once. More of them, in another
order and at other places, and on real conversations (a path, or one below the folder of real data):

    MEGAFLOW_FAULT_COUNT=40 MEGAFLOW_FAULT_SEED=7 uv run pytest -n0 -s tests/fault/test_pipeline_faults.py
    MEGAFLOW_FAULT_INPUT=tau-bench/historical_trajectories uv run pytest -n0 -s tests/fault/test_pipeline_faults.py

Faults that find no place in the input (a step that it does not reach) are met by conversations of our own after it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.pipeline_case import Pipeline
from tests.fault.pipeline_proof import prove
from tests.fault.pipeline_schedule import PAIRS, schedule

COUNT = int(os.environ.get("MEGAFLOW_FAULT_COUNT", PAIRS))
SEED = int(os.environ.get("MEGAFLOW_FAULT_SEED", "1"))
INPUT = os.environ.get("MEGAFLOW_FAULT_INPUT", "")


@pytest.fixture
def inputs(request: pytest.FixtureRequest) -> list[Path]:
    """What the first run publishes; empty for the project's samples."""
    if not INPUT:
        return []
    return [Path(INPUT).resolve() if Path(INPUT).exists() else request.getfixturevalue("real_data") / INPUT]


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    pipeline = Pipeline(tmp_path, schedule(SEED, COUNT, tmp_path))
    pipeline.create()
    yield pipeline
    pipeline.end()


@pytest.mark.timeout(1500 + 120 * COUNT)
def test_every_conversation_once_and_the_weights_of_an_undisturbed_run(pipeline: Pipeline, inputs: list[Path]) -> None:
    begun = time.monotonic()
    pipeline.run(inputs)
    seed = 100
    while pipeline.left:  # some faults need more steps or commits than the input gives
        assert seed < 120, f"faults that found no place: {[str(fault) for fault in pipeline.left]}"
        pipeline.run([pipeline.publish_more(seed)])
        seed += 1
    disturbed = time.monotonic()
    for strike in pipeline.strikes:
        print(strike.fault)
    assert pipeline.killed_runs == sum(f.kind == "run" and f.action == "kill" for f in pipeline.faults)
    proof = asyncio.run(prove(pipeline))
    print(f"{pipeline.runs} runs {disturbed - begun:.0f} s, proof {time.monotonic() - disturbed:.0f} s: {proof}")
    assert proof.problems == []
    assert pipeline.orphans() == []
