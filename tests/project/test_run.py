"""The main job as a user meets it: run, run again, publish more and run once more; told to stop in the middle."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import orjson
import pytest

from megaflow_stream.checkpoint import head, lineage
from megaflow_stream.checkpoint.reader import read_manifest
from megaflow_stream.processing.steps.features import is_validation
from megaflow_stream.project.folder import find
from megaflow_stream.runtime.connection import connected
from tests.fault.pipeline_case import JOB, Pipeline
from tests.unit.test_pipeline import DESIGN


def trained(pipeline: Pipeline) -> set[str]:
    """The conversations in the lineage of the head."""

    async def ask() -> set[str]:
        project = find(pipeline.root)
        async with connected(project, project.settings) as connection:
            top = await head(connection.store, JOB)
            assert top is not None
            found: set[str] = set()
            async for chunk in lineage.walk(connection.store, await read_manifest(connection.store, top.ref)):
                found |= set(chunk.rows.column("conversation").to_pylist())
            return found

    return asyncio.run(ask())


@pytest.mark.timeout(900)
def test_run_then_nothing_new_then_exactly_what_is_new(pipeline: Pipeline) -> None:
    first = pipeline.run()
    assert first["conversations_published"] >= 500
    assert first["dead_letters"] == sum(first["dead_letter_reasons"].values()) > 0
    assert first["dropped"]["duplicate"] > 0
    assert first["steps"] > 10
    assert first["last_loss"] < first["first_loss"]
    assert first["validation_loss"] < first["first_loss"]
    assert first["promoted_checkpoint"] is not None
    assert first["restarts"] == {}
    assert (Path(first["run_folder"]) / "loss.png").stat().st_size > 1000
    before = trained(pipeline)

    second = pipeline.run()
    assert second["nothing_new"]
    assert second["conversations_published"] == second["steps"] == second["checkpoints"] == 0
    assert second["promoted_checkpoint"] == first["promoted_checkpoint"]

    (pipeline.root / "pipeline.yaml").write_text(DESIGN)
    path = pipeline.publish_more(seed=77, count=60)
    third = pipeline.run([path])
    assert third["conversations_published"] == 60
    assert third["steps"] > 0
    new = {orjson.loads(line)["id"] for line in path.read_bytes().splitlines() if b'"id"' in line}
    added = trained(pipeline) - before
    assert {i for i in new if not is_validation(i, 0.05)} & added == added & new
    assert len(added) >= third["stages"]["features"]["conversations"] - third["stages"]["features"].get(
        "validation_conversations", 0
    ) - third["stages"]["features"].get("untrainable", 0)
    last = pipeline.run([limited(pipeline, first["steps"] + third["steps"] + 2)])
    assert (last["conversations_published"], last["steps"], last["restarts"]) == (90, 2, {})
    assert pipeline.orphans() == []


def limited(pipeline: Pipeline, max_steps: int) -> Path:
    """More conversations than the trainer may still train; a job at its limit is over."""
    path = pipeline.root / "trainers" / "model_finetune.py"
    text = path.read_text()
    assert "trainer = Trainer(" in text
    path.write_text(text.replace("trainer = Trainer(", f"trainer = Trainer(\n    max_steps={max_steps},"))
    return pipeline.publish_more(seed=78, count=90)


@pytest.mark.timeout(400)
def test_sigterm_ends_everything_with_a_last_checkpoint(pipeline: Pipeline) -> None:
    with (pipeline.folder / "run.log").open("wb") as log:
        process = subprocess.Popen(pipeline._command("run"), stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    with process.stdout:
        step = 0
        for line in process.stdout:
            event = orjson.loads(line)
            if event["event"] == "status":
                step = max(step, event["components"].get(f"trainer/{JOB}", {}).get("step") or 0)
            if step >= 6:
                break
        assert step >= 6, (pipeline.folder / "run.log").read_text()[-2000:]
        second = subprocess.run(pipeline._command("run"), capture_output=True, check=False)
        assert second.returncode == 2
        assert f"this project runs already, as process {process.pid}" in second.stderr.decode()
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait() == 130
        seconds = time.monotonic() - asked
    summary = orjson.loads(rest.splitlines()[-1])
    assert summary["event"] == "summary"
    assert summary["steps"] >= step  # the steps of the last checkpoint
    assert pipeline.orphans() == []
    print(f"ended {seconds:.1f} s after SIGTERM")
