"""A project with a small model, for the tests that run it whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.pipeline_case import Pipeline


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    pipeline = Pipeline(tmp_path)
    pipeline.create()
    yield pipeline
    pipeline.end()
