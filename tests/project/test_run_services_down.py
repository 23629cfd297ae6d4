"""`megaflow services down` while a run is going on: it ends the run, and says so."""

from __future__ import annotations

import subprocess

import orjson
import pytest

from tests.fault.pipeline_case import Pipeline


@pytest.mark.timeout(300)
def test_services_that_are_stopped_on_purpose_end_the_run(pipeline: Pipeline) -> None:
    log = pipeline.folder / "run.log"
    with log.open("wb") as errors:
        run = subprocess.Popen(pipeline._command("run"), stdout=subprocess.PIPE, stderr=errors)
    assert run.stdout is not None
    with run.stdout:
        for line in run.stdout:
            if orjson.loads(line)["event"] == "published":
                break
        subprocess.run(pipeline._command("services", "down"), check=True, capture_output=True)
        rest = [orjson.loads(line) for line in run.stdout]
    said = log.read_text()
    assert run.wait() == 3, said[-3000:]
    error = "Kafka and S3 were stopped by `megaflow services down`"
    assert said.splitlines()[-1] == f"error: {error}"
    assert (rest[-1]["event"], rest[-1]["error"]) == ("summary", error)
    assert pipeline.orphans() == []
