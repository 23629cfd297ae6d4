"""A whole `megaflow run`, its processes killed and frozen at exact places, and the check of everything it made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil
import pyarrow as pa

from megaflow_stream.checkpoint import head, lineage
from megaflow_stream.checkpoint.reader import read_manifest
from megaflow_stream.conversations import synthetic
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.features import record
from megaflow_stream.processing.frames import input_batch
from megaflow_stream.project.folder import find
from megaflow_stream.project.scaffold import init
from megaflow_stream.runtime.connection import connected
from tests.engine_cases.case import everything

JOB = "model_finetune"
# (point, its values, which of its times): one of each kind of component, and what may happen to it there.
WORKER = ("worker.before_init", "worker.before_offsets", "worker.before_commit", "worker.after_commit")
RANK = ("rank.before_plan", "rank.before_reduce", "rank.after_reduce", "rank.after_apply", "rank.before_exchange")
STORE = ("checkpoint.before_chunk", "checkpoint.before_manifest", "checkpoint.before_head", "checkpoint.after_head")
EVALUATOR = ("evaluator.before_commit", "evaluator.after_commit")
HOLD_SECONDS = 13.0  # frozen for longer than a session, and than the trainer's bound


@dataclass(frozen=True)
class Fault:
    """What `megaflow_stream.faults` is told, and whom the harness kills while the component that reached it is frozen.

    victim: kafka, s3, run; empty when the component itself is the victim.
    """

    settings: dict[str, Any]
    victim: str = ""

    @property
    def once(self) -> Path:
        return Path(self.settings["once"])


def schedule(seed: int, count: int, folder: Path) -> list[Fault]:
    """`count` faults: every kind of victim in turn, at places that the seed chooses."""
    rng = random.Random(seed)
    kinds = ["worker", "compute", "rank", "store", "evaluator", "kafka", "s3", "run"]
    rng.shuffle(kinds)
    faults = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        action, victim = rng.choice(["kill", "kill", "stop"]), ""
        values: dict[str, Any] = {"nth": rng.randint(1, 3)}
        if kind == "worker":
            point = rng.choice(WORKER)
            values["processor"] = rng.choice(["clean", "features"])
            values["nth"] = 1 if point == "worker.before_init" else values["nth"]
        elif kind == "compute":
            point, action = "compute.before_handler", "kill"
            values = {"processor": rng.choice(["clean", "features"]), "nth": 1}
        elif kind == "rank":
            point = rng.choice(RANK)
            if point != "rank.before_plan":
                values["rank"] = rng.randint(0, 1)
        elif kind == "store":
            point, action, values = rng.choice(STORE), "kill", {"nth": 1}
        elif kind == "evaluator":
            point, values = rng.choice(EVALUATOR), {"nth": 1}
        else:
            action, victim = "stop", kind
            point = rng.choice(("checkpoint.before_head", "checkpoint.before_chunk", "rank.after_apply"))
            if kind == "kafka":
                point = rng.choice(("worker.before_commit", "rank.before_plan", "evaluator.before_commit"))
        once = str(folder / f"fault-{number:02d}")
        faults.append(Fault({"point": point, **values, "action": action, "once": once}, victim))
    return faults


@dataclass
class Pipeline:
    """A project in `folder` with a small model, and runs of it."""

    folder: Path
    faults: Sequence[Fault] = ()
    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.root = self.folder / "project"
        self._thaw_at: dict[Path, float] = {}

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

    @property
    def left(self) -> list[Fault]:
        return [fault for fault in self.faults if not fault.once.exists()]

    def run(self, inputs: Sequence[Path] = (), *, limit_seconds: float = 400) -> dict[str, Any]:
        """`megaflow run --until-idle` to its end, through every fault that finds its place; its summary."""
        deadline = time.monotonic() + limit_seconds
        while True:
            self.runs += 1
            log = self.folder / f"run-{self.runs}.log"
            with log.open("wb") as err, (self.folder / f"run-{self.runs}.json").open("w+b") as out:
                process = subprocess.Popen(
                    self._command("run", "--until-idle", *(f"--input={path}" for path in inputs)),
                    stdout=out,
                    stderr=err,
                    env={**os.environ, "MEGAFLOW_FAULTS": json.dumps([f.settings for f in self.left])},
                )
                while process.poll() is None:
                    assert time.monotonic() < deadline, f"the run does not end: {log.read_text()[-2000:]}"
                    self._tend(process)
                    time.sleep(0.1)
                out.seek(0)
                lines = out.read().splitlines()
            if process.returncode == -signal.SIGKILL:
                continue  # it was a victim: the next one goes on
            assert process.returncode == 0, log.read_text()[-3000:]
            summary: dict[str, Any] = orjson.loads(lines[-1])
            return summary

    def _tend(self, run: subprocess.Popen[bytes]) -> None:
        """Kills the victims of frozen components, and thaws what has been frozen long enough."""
        now = time.monotonic()
        for fault in self.faults:
            if fault.settings["action"] != "stop" or not fault.once.exists() or not fault.once.read_text():
                continue
            if fault.once not in self._thaw_at:
                if fault.victim:
                    self._kill(fault.victim, run)
                self.kills[fault.victim or "frozen"] += 1
                self._thaw_at[fault.once] = now + (0.2 if fault.victim else HOLD_SECONDS)
            elif self._thaw_at[fault.once] <= now:
                self._thaw_at[fault.once] = float("inf")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(fault.once.read_text()), signal.SIGCONT)

    def _kill(self, victim: str, run: subprocess.Popen[bytes]) -> None:
        if victim == "run":
            run.kill()
            return
        ours = {"kafka": "kafka.Kafka", "s3": "-s3"}[victim]
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if ours in line and any(str(self.root) in part for part in line):
                process.kill()

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "megaflow_stream.cli.main", *arguments, "--json", "--project", str(self.root)]

    def replay(self) -> str:
        """The digest of the weights that an undisturbed training of the same plan ends with."""
        done = subprocess.run(
            self._command("train", JOB, "--replay", "--nproc-per-node", "1"), capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        events = [orjson.loads(line) for line in done.stdout.splitlines()]
        return str(next(e["weights_sha256"] for e in reversed(events) if e["event"] == "stopped"))

    def problems(self) -> list[str]:
        return asyncio.run(self._problems())

    def weights(self) -> str:
        async def ask() -> str:
            project = find(self.root)
            async with connected(project, project.settings) as connection:
                top = await head(connection.store, JOB)
                assert top is not None
                return str((await read_manifest(connection.store, top.ref)).state["weights_sha256"])

        return asyncio.run(ask())

    async def _problems(self) -> list[str]:
        """Every conversation in the features as often as undisturbed processors put it, every feature trained once."""
        found = []
        project = find(self.root)
        (_, clean), (_, features) = project.processors("data_preprocess")
        async with connected(project, project.settings) as connection:
            bus, store = connection.bus, connection.store
            topics = {
                name: await everything(bus, name)
                for name in ("conversations.raw", "conversations.clean", "features.agent", "features.agent.validation")
            }
            wanted = _handled(clean, topics["conversations.raw"], unique=False)
            got = Counter(r.key for part in topics["conversations.clean"].values() for r in part)
            expected = Counter(wanted.column("key").to_pylist())
            if got != expected:
                found.append(f"clean: {sum((expected - got).values())} lost, {sum((got - expected).values())} doubled")
            handler = features.build()
            pieces: Counter[str] = Counter()
            for part in topics["conversations.clean"].values():
                first = list({r.key: r for r in reversed(part)}.values())
                for row in first:
                    outputs = handler(input_batch(features, [row], "conversations.clean", 0)).outputs
                    for batch in outputs.values():
                        for value in batch.column("value").to_pylist():
                            pieces.update(record.decode(value).conversations)
            made: Counter[str] = Counter()
            for topic in ("features.agent", "features.agent.validation"):
                for part in topics[topic].values():
                    for row in part:
                        made.update(record.decode(row.value or b"").conversations)
            if made != pieces:
                found.append(f"features: {sum((pieces - made).values())} lost, {sum((made - pieces).values())} doubled")
            top = await head(store, JOB)
            assert top is not None
            manifest = await read_manifest(store, top.ref)
            trained: Counter[tuple[int, int, int]] = Counter()
            async for chunk in lineage.walk(store, manifest):
                rows = {
                    (r["partition"], r["offset"], r["step"]) for r in chunk.rows.to_pylist()
                }  # a row a conversation
                trained.update((partition, offset, 0) for partition, offset, _ in rows)
            there = Counter((r.partition, r.offset, 0) for part in topics["features.agent"].values() for r in part)
            if trained != there:
                missing, twice = sum((there - trained).values()), sum((trained - there).values())
                found.append(f"trained: {missing} left out, {twice} twice")
        return found

    def orphans(self) -> list[str]:
        """Processes of the project that still run."""
        lines = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = process.info["cmdline"] or []
            if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(self.root) in part for part in line):
                lines.append(" ".join(line)[:150])
        return lines

    def end(self) -> None:
        """Ends what a failed test left, and its files."""
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.root) in part for part in process.info["cmdline"] or []):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        shutil.rmtree(self.root, ignore_errors=True)


def _handled(processor: Processor, parts: dict[int, list[Any]], *, unique: bool) -> pa.Table:
    handler = processor.build()
    batches = []
    for partition, rows in parts.items():
        if rows:
            batches += handler(input_batch(processor, rows, processor.source, partition)).outputs.values()
    return pa.Table.from_batches(batches)
