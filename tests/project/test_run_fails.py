"""A run that cannot go on, and one that is told to stop before it has begun."""

from __future__ import annotations

import os
import signal
import subprocess

import orjson
import pytest

from tests.fault.pipeline_case import Pipeline

BROKEN = """
from dataclasses import dataclass as _dataclass


@_dataclass(frozen=True)
class _Broken:
    def __call__(self):
        raise LookupError("there is no lexicon")


"""


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
    assert pipeline.orphans() == []


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
