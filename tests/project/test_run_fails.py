"""A run that cannot go on, and one that is told to stop before it has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import orjson
import psutil
import pytest

from tests.fault.pipeline_case import Pipeline

BROKEN = """
from dataclasses import dataclass as _dataclass


@_dataclass(frozen=True)
class _Broken:
    def __call__(self):
        raise LookupError("there is no lexicon")


"""

ENDLESS = """
def build_model() -> Any:
    import pathlib, threading

    (pathlib.Path(__file__).parents[2] / "building").touch()
    threading.Event().wait()


def _build_model() -> Any:"""


@pytest.mark.timeout(300)
def test_a_component_that_cannot_start_ends_the_run_with_the_cause(pipeline: Pipeline) -> None:
    """The definition loads, so the run begins; its handler is built in the worker's compute process only."""
    path = pipeline.root / "processors" / "data_preprocess.py"
    text = path.read_text()
    build = 'build=cleaning.Clean(output="conversations.clean"),'
    assert build in text
    path.write_text(text.replace("\nclean = ", f"{BROKEN}\nclean = ").replace(build, "build=_Broken(),"))
    ran = subprocess.run(pipeline._command("run", "--until-idle"), capture_output=True, text=True, timeout=200)
    assert ran.returncode == 1, ran.stderr[-3000:]
    last = ran.stderr.splitlines()[-1]
    assert "the handler of processor clean cannot be built: LookupError: there is no lexicon" in last
    assert "refuses to start" in ran.stderr
    summary = orjson.loads(ran.stdout.splitlines()[-1])
    assert summary["event"] == "summary"
    assert "there is no lexicon" in summary["error"]
    assert summary["restarts"]
    assert summary["seconds"]["total"] > 0
    assert orjson.loads((Path(summary["run_folder"]) / "summary.json").read_bytes())["error"] == summary["error"]
    assert pipeline.orphans() == []


def test_a_service_that_is_not_there_ends_the_run_with_a_summary(pipeline: Pipeline) -> None:
    """Exit status 3; nothing is known of it but that, and the last event says so."""
    ran = subprocess.run(
        pipeline._command(
            "run", "--until-idle", "--bootstrap-servers=127.0.0.1:9", "--s3-endpoint-url=http://127.0.0.1:9"
        ),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 3, ran.stderr[-3000:]
    (summary,) = [orjson.loads(line) for line in ran.stdout.splitlines()]
    assert summary["event"] == "summary"
    assert ran.stderr.splitlines()[-1] == f"error: {summary['error']}"
    assert "127.0.0.1:9" in summary["error"]
    assert (summary["conversations_published"], summary["steps"]) == (0, 0)


@pytest.mark.timeout(300)
def test_a_signal_while_it_publishes_ends_it(pipeline: Pipeline) -> None:
    """The input is a pipe that gives nothing: publishing alone would never end."""
    endless = pipeline.folder / "endless.jsonl"
    subprocess.run(["mkfifo", str(endless)], check=True)
    holder = os.open(endless, os.O_RDWR)
    with (pipeline.folder / "run.log").open("wb") as log:
        run = subprocess.Popen(pipeline._command("run", f"--input={endless}"), stdout=subprocess.PIPE, stderr=log)
    assert run.stdout is not None
    try:
        for line in run.stdout:
            if orjson.loads(line)["event"] == "topics":
                break
        run.send_signal(signal.SIGTERM)
        rest = run.stdout.read()
        assert run.wait(60) == 130, (pipeline.folder / "run.log").read_text()[-2000:]
    finally:
        os.close(holder)
        run.stdout.close()
    assert orjson.loads(rest.splitlines()[-1])["event"] == "summary"
    assert pipeline.orphans() == []


@pytest.mark.timeout(300)
def test_a_signal_while_the_trainer_starts_ends_it_in_order(pipeline: Pipeline) -> None:
    """Its ranks build their models for ever, as an import of torch may take on a busy machine: nothing is trained yet,
    so nothing is to be stored, and the end is the usual one."""
    path = pipeline.root / "trainers" / "model_finetune.py"
    path.write_text(path.read_text().replace("\ndef build_model() -> Any:", ENDLESS))
    building = pipeline.folder / "building"
    with (pipeline.folder / "run.log").open("wb") as log:
        run = subprocess.Popen(pipeline._command("run"), stdout=subprocess.PIPE, stderr=log)
    assert run.stdout is not None
    with run.stdout:
        for _ in run.stdout:  # a status event a second
            if building.exists():
                break
        assert building.exists(), (pipeline.folder / "run.log").read_text()[-2000:]
        theirs = psutil.Process(run.pid).children(recursive=True)
        assert sum("megaflow_stream.training.rank" in process.cmdline() for process in theirs) == 2
        asked = time.monotonic()
        run.send_signal(signal.SIGTERM)
        rest = [orjson.loads(line) for line in run.stdout.read().splitlines()]
        assert run.wait(60) == 130, (pipeline.folder / "run.log").read_text()[-2000:]
        seconds = time.monotonic() - asked
    assert psutil.wait_procs(theirs, timeout=10)[1] == pipeline.orphans() == []
    assert rest[-1]["event"] == "summary"
    assert (rest[-1]["error"], rest[-1]["restarts"], rest[-1]["steps"]) == (None, {}, 0)
    said = "".join(path.read_text() for path in (Path(rest[-1]["run_folder"]) / "logs").iterdir())
    assert "error:" not in said
    assert "Traceback" not in said + (pipeline.folder / "run.log").read_text()
    print(f"ended {seconds:.1f} s after SIGTERM")
