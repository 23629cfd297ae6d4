"""The promise, through faults: a conversation published once has one effect on the model, whatever dies in between.

CI runs a few faults of every kind. The 20 and more of the promise's figure, also on real conversations:

    MEGAFLOW_FAULT_COUNT=24 uv run pytest -n0 tests/fault/test_pipeline_faults.py --timeout 3600
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.pipeline_case import Pipeline, schedule

COUNT = int(os.environ.get("MEGAFLOW_FAULT_COUNT", "8"))
SEED = int(os.environ.get("MEGAFLOW_FAULT_SEED", "1"))


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    pipeline = Pipeline(tmp_path, schedule(SEED, COUNT, tmp_path))
    pipeline.create()
    yield pipeline
    pipeline.end()


@pytest.mark.timeout(1500 + 120 * COUNT)
def test_every_conversation_once_and_the_weights_of_an_undisturbed_run(pipeline: Pipeline) -> None:
    pipeline.run()
    seed = 100
    while pipeline.left:  # some faults need more steps or commits than the samples give
        assert seed < 120, f"faults that found no place: {[f.settings for f in pipeline.left]}"
        pipeline.run([pipeline.publish_more(seed)])
        seed += 1
    assert pipeline.problems() == []
    assert pipeline.weights() == pipeline.replay()
    assert pipeline.orphans() == []
