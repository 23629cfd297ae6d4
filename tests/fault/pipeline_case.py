"""A whole project with a small model, and runs of it: undisturbed, or through faults at exact places."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil

from megaflow_stream.conversations import synthetic
from megaflow_stream.project.scaffold import init
from tests.fault.pipeline_faults import Strike, marked
from tests.fault.pipeline_schedule import Fault

JOB = "model_finetune"
ORPHAN_SECONDS = 20.0  # twice the time after which a process without its parent exits, done or not
LIMIT_SECONDS = 1800.0  # of one run, kills of it included: a bound for a hang, on a machine that does other things too
_MARK = "PIPELINE_CASE_FOLDER"  # in the environment of every process of a run: ranks do not name their project


@dataclass
class Pipeline:
    """A project in `folder` with a small model, and runs of it.

    faults: those that the runs are to meet, each once. published: every input of the runs so far.
    """

    folder: Path
    faults: Sequence[Fault] = ()
    runs: int = 0
    killed_runs: int = 0
    published: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = self.folder / "project"
        self.strikes = [Strike(fault, self._processes) for fault in self.faults]
        self._run: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        init(self.root)
        trainer = self.root / "trainers" / f"{JOB}.py"
        text = trainer.read_text()
        for old, new in (
            ("layers=4, heads=4, width=128, hidden=344", "layers=1, heads=2, width=32, hidden=64"),
            ("global_batch=16", "global_batch=8, rank_timeout_seconds=10.0"),
        ):
            assert old in text, old
            text = text.replace(old, new)
        trainer.write_text(text)
        pipeline = self.root / "pipeline.yaml"
        lines = [
            "    checkpoint: every 4 steps" if line.lstrip().startswith("checkpoint:") else line
            for line in pipeline.read_text().splitlines()
        ]
        pipeline.write_text("\n".join(lines).replace("parallelism: 1", "parallelism: 2") + "\n")

    def publish_more(self, seed: int, count: int = 250) -> Path:
        path = self.folder / f"more-{seed}.jsonl"
        path.write_bytes(b"".join(orjson.dumps(d) + b"\n" for d in synthetic.documents(count, seed=seed)))
        return path

    def run(self, inputs: Sequence[Path] = ()) -> dict[str, Any]:
        """`megaflow run --until-idle` to its end, through every fault that finds its place; its summary.

        A run that is killed is followed by another of the same command."""
        self.published += inputs or [self.root / "topics" / "samples"]
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            self.runs += 1
            log = self.folder / f"run-{self.runs}.log"
            with log.open("wb") as err, (self.folder / f"run-{self.runs}.json").open("w+b") as out:
                self._run = subprocess.Popen(
                    self._command("run", "--until-idle", *(f"--input={path}" for path in inputs)),
                    stdout=out,
                    stderr=err,
                    env={
                        **os.environ,
                        _MARK: str(self.folder),
                        "MEGAFLOW_FAULTS": json.dumps([s.fault.settings for s in self.strikes if not s.reached]),
                    },
                )
                while self._run.poll() is None:
                    self._tend(deadline)
                out.seek(0)
                lines = out.read().splitlines()
            if self._run.returncode == -signal.SIGKILL:
                pids = {
                    p.pid for s in self.strikes if s.fault.kind == "run" and s.fault.action == "kill" for p in s.hit
                }
                assert self._run.pid in pids, "somebody else has killed the run"
                self.killed_runs += 1
                continue  # at once: what was frozen meanwhile goes on beside the next one
            assert self._run.returncode == 0, log.read_text()[-3000:]
            while any(strike.struck and not strike.over for strike in self.strikes):
                self._tend(deadline)
            for strike in self.strikes:
                strike.again()
            summary: dict[str, Any] = orjson.loads(lines[-1])
            return summary

    @property
    def left(self) -> list[Fault]:
        """The faults that have found no place so far."""
        return [strike.fault for strike in self.strikes if not strike.over]

    def _tend(self, deadline: float) -> None:
        going_on = [str(strike.fault) for strike in self.strikes if strike.reached and not strike.over]
        assert time.monotonic() < deadline, f"run {self.runs} does not end; faults going on: {going_on}"
        for strike in self.strikes:
            strike.tend()
        time.sleep(0.1)

    def _processes(self, kind: str) -> list[psutil.Process]:
        if kind == "run":
            return [psutil.Process(self._run.pid)] if self._run is not None and self._run.poll() is None else []
        word = {"kafka": "kafka.Kafka", "s3": "-s3", "launcher": "train", "statistics": "statistics"}[kind]
        return [process for process, arguments in self._alive().items() if word in arguments]

    def _alive(self) -> dict[psutil.Process, list[str]]:
        return marked(_MARK, str(self.folder), str(self.root))

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "megaflow_stream.cli.main", *arguments, "--json", "--project", str(self.root)]

    def replay(self) -> str:
        """Trains the logged plan again, undisturbed and with one rank; the digest of the weights it ends with."""
        done = subprocess.run(
            self._command("train", JOB, "--replay", "--nproc-per-node", "1"), capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        events = [orjson.loads(line) for line in done.stdout.splitlines()]
        return str(next(e["weights_sha256"] for e in reversed(events) if e["event"] == "stopped"))

    def orphans(self) -> list[str]:
        """Processes of the project that still run, when those that their run's death has told so have had the time
        to end."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [" ".join(arguments)[:150] for arguments in alive.values()]

    def end(self) -> None:
        """Ends what a failed test left, and its files."""
        for process in self._alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.root, ignore_errors=True)
