"""`megaflow checkpoints`, `lineage` and `evaluate` in a project, on a real Kafka and a real S3."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
import safetensors.numpy

from megaflow_stream.bus import connect
from megaflow_stream.bus.api import TopicDescription
from megaflow_stream.checkpoint import CheckpointWriter, Head, Snapshot, TensorSpec, alias, load, names, read_manifest
from megaflow_stream.cli import main as entry
from megaflow_stream.features.record import encode
from megaflow_stream.processing.steps.features import is_validation
from megaflow_stream.storage.s3 import S3Store
from tests.integration.evaluation_case import sequence, tensors_of

BUCKET = "test-storage"
TRAINER = """
from megaflow_stream.definitions.trainer import CheckpointEvery, Trainer
from tests.integration.evaluation_case import build_model, loss

trainer = Trainer(
    name="{job}", data="{job}.features", validation="{job}.validation", tokenizer="none", build_model=build_model,
    loss=loss, build_optimizer=list, block_tokens=16, export=lambda name: "renamed." + name,
)
"""
EVALUATION = """
from megaflow_stream.definitions.trainer import Evaluation

evaluation = Evaluation(name="{job}_evaluation", trainer="{job}", micro_slice=3)
"""
PROCESSORS = """
from pathlib import Path
from megaflow_stream.definitions.processor import Processor, Sink
from megaflow_stream.processing.steps.features import Features

features = Processor(
    name="features", source="{job}.clean", dropped="{job}.dropped", dead_letters="{job}.dlq",
    build=Features(tokenizer=Path("none"), validation_share=0.5), sinks=[Sink(topic="{job}.features")],
)
"""


@dataclass
class Made:
    """A project with three checkpoints of its job."""

    job: str
    root: Path
    heads: list[Head]
    kafka: str
    s3: Any

    @asynccontextmanager
    async def store(self) -> AsyncIterator[S3Store]:
        store = S3Store(
            endpoint_url=self.s3.endpoint_url,
            bucket=BUCKET,
            access_key=self.s3.access_key,
            secret_key=self.s3.secret_key,
        )
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    async def produce(self, topic: str, value: bytes, key: bytes | None = None, headers: Any = ()) -> None:
        bus = await connect(self.kafka)
        await bus.create_topic(TopicDescription(topic, 1, {}))
        producer = await bus.producer()
        await (await producer.send(topic, value, key=key, headers=headers))
        await producer.close()
        await bus.close()


@pytest.fixture
def made(kafka: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    job = f"cli_{secrets.token_hex(5)}"
    for name in [name for name in os.environ if name.startswith("MEGAFLOW_") and "TEST" not in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setenv("MEGAFLOW_S3__ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("MEGAFLOW_S3__ACCESS_KEY", s3.access_key)
    monkeypatch.setenv("MEGAFLOW_S3__SECRET_KEY", s3.secret_key)
    monkeypatch.setenv("MEGAFLOW_S3__BUCKET", BUCKET)
    stages = "".join(f"  - name: {name}\n" for name in ("features", job, f"{job}_evaluation"))
    (tmp_path / "pipeline.yaml").write_text(f"pipeline:\n{stages}")
    for folder, name, text in (
        ("trainers", job, TRAINER),
        ("trainers", f"{job}_evaluation", EVALUATION),
        ("processors", "features", PROCESSORS),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(text.replace("{job}", job))
    monkeypatch.chdir(tmp_path)
    made = Made(job, tmp_path, [], kafka, s3)
    asyncio.run(_checkpoints(made))
    yield made
    asyncio.run(_clean(made))


async def _checkpoints(made: Made) -> None:
    async with made.store() as store:
        writer, head = CheckpointWriter(store, made.job, definition={"tokenizer": "ab" * 32}), None
        for step in (1, 2, 3):
            weight = np.full((4, 3), step, np.float32)
            tensors = [
                (TensorSpec("weight", "float32", (4, 3), "trainable"), memoryview(weight).cast("B")),
                (TensorSpec("half", "bfloat16", (2,), "frozen"), memoryview(b"\x80\x3f\x00\x40")),
                (TensorSpec("optimizer/weight/step", "float32", (), "optimizer"), memoryview(bytearray(4))),
            ]
            rows = {
                "conversation": [f"c{step}", "often"],
                "topic": [f"{made.job}.features"] * 2,
                "partition": [0, 0],
                "offset": [step, step],
                "step": [step, step],
            }
            state = {
                "offsets": {f"{made.job}.features/0": 0},
                "totals": {"records": step, "tokens": 10 * step},
                "loss": 1.5,
            }
            head = await writer.save(Snapshot(step=step, tensors=tensors, state=state, lineage=pa.table(rows)), head)
            made.heads.append(head)
        await alias.move(store, made.job, "best", made.heads[1].ref, None, {})


async def _clean(made: Made) -> None:
    bus = await connect(made.kafka)
    for name in [name for name in await bus.topics() if name.startswith(made.job)]:
        await bus.delete_topic(name)
    await bus.close()


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any, str]:
    """(exit code, stdout as JSON, stderr)."""
    code = entry.run([*args, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_list_shows_every_checkpoint_newest_first(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows, _ = call(capsys, "checkpoints", "list")
    assert code == 0
    assert [(row["step"], row["state"], row["aliases"]) for row in rows] == [
        (3, "head", []),
        (2, "kept", ["best"]),
        (1, "kept", []),
    ]
    assert rows[0]["counters"] == {"records": 3, "tokens": 30, "loss": 1.5}
    assert rows[0]["size_bytes"] == 48 + 4 + 4
    assert rows[0]["new_bytes"] == 48
    assert rows[2]["new_bytes"] == 56
    assert entry.run(["checkpoints", "list"]) == 0
    assert "1.5000" in capsys.readouterr().out
    code, rows, _ = call(capsys, "checkpoints", "list", "--job", "no-such-job")
    assert (code, rows) == (0, [])


def test_show_takes_steps_keys_aliases_and_head(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    key = made.heads[1].manifest
    for which in ("2", "best", key, key.rpartition("/")[2]):
        code, shown, _ = call(capsys, "checkpoints", "show", which)
        assert (code, shown["manifest"]) == (0, key)
    assert call(capsys, "checkpoints", "show")[1]["step"] == 3
    assert shown["state"]["offsets"] == {f"{made.job}.features/0": 0}
    assert len(shown["tensors"]) == 3
    code, _, err = call(capsys, "checkpoints", "show", "77")
    assert code == 1
    assert "megaflow checkpoints list" in err
    assert entry.run(["checkpoints", "show", "best"]) == 0
    assert "next offset of" in capsys.readouterr().out


def test_verify_finds_damage_and_exits_with_1(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    code, results, _ = call(capsys, "checkpoints", "verify")
    assert code == 0
    assert [(result["step"], result["problems"]) for result in results] == [(3, []), (2, []), (1, [])]

    async def damage() -> None:
        async with made.store() as store:
            manifest = await read_manifest(store, made.heads[1].ref)
            (own,) = manifest.chunks(["trainable"])
            await store.put(names.chunk(made.job, own), b"x")

    asyncio.run(damage())
    code, results, _ = call(capsys, "checkpoints", "verify")
    assert code == 1
    assert [bool(result["problems"]) for result in results] == [False, True, False]
    assert call(capsys, "checkpoints", "verify", "best")[0] == 1
    assert call(capsys, "checkpoints", "verify", "head")[0] == 0


def test_prune_says_first_and_then_does(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    code, report, _ = call(capsys, "checkpoints", "prune", "--keep", "2", "--dry-run")
    assert (code, report["dry_run"], report["manifests"]) == (0, True, [made.heads[0].manifest])
    assert len(call(capsys, "checkpoints", "list")[1]) == 3
    code, report, _ = call(capsys, "checkpoints", "prune", "--keep", "2", "--grace", "0s")
    assert (code, report["manifests"]) == (0, [made.heads[0].manifest])
    assert [row["step"] for row in call(capsys, "checkpoints", "list")[1]] == [3, 2]
    assert call(capsys, "checkpoints", "prune", "--grace", "soon")[0] == 2
    assert call(capsys, "checkpoints", "prune", "--keep", "1")[0] == 2


def test_export_writes_safetensors_that_the_library_reads(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = call(capsys, "checkpoints", "export", "best", "--output", "model.safetensors")
    assert code == 0
    data = Path("model.safetensors").read_bytes()
    assert said["size_bytes"] == len(data)
    with safetensors.safe_open("model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        assert sorted(file.keys()) == ["renamed.half", "renamed.weight"]
        assert file.get_tensor("renamed.weight").tolist() == [[2.0] * 3] * 4
        assert file.get_tensor("renamed.half").tolist() == [1.0, 2.0]
        assert file.metadata()["megaflow.step"] == "2"
        assert file.metadata()["megaflow.manifest"] == made.heads[1].manifest
    code, _, err = call(capsys, "checkpoints", "export", "best", "--output", "model.safetensors")
    assert code == 2
    assert "--force" in err
    assert call(capsys, "checkpoints", "export", "head", "-o", "model.safetensors", "--force")[0] == 0
    assert Path("model.safetensors").read_bytes() != data
    assert [path.name for path in Path().glob("*.partial")] == []
    assert entry.run(["checkpoints", "export", "1"]) == 0
    assert Path(f"{made.job}-1.safetensors").exists()


def test_lineage_of_a_checkpoint(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = call(capsys, "lineage", "best")
    assert code == 0
    assert (shown["step"], shown["records"], shown["conversations"], shown["steps"]) == (2, 2, 3, 2)
    assert [row["conversation"] for row in shown["rows"]] == ["c1", "often", "c2", "often"]
    assert entry.run(["lineage", "head"]) == 0
    out, err = capsys.readouterr()
    assert "4 conversations in 3 packed sequences, trained in 3 steps" in err
    assert "c3" in out


def test_lineage_of_a_conversation(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    kept = next(f"v{n}" for n in range(99) if is_validation(f"v{n}", 0.5))

    async def topics() -> None:
        job = made.job
        value = {"conversation": "often", "reason": "duplicate", "processor": "features", "topic": f"{job}.clean"}
        dropped = orjson.dumps({**value, "partition": 0, "offset": 7, "at_ms": 1})
        await made.produce(f"{job}.dropped", dropped, b"often")
        headers = [("conversation", b"bad"), ("error", b"not JSON"), ("processor", b"clean")]
        await made.produce(f"{job}.dlq", b"{", b"other", headers)
        await made.produce(f"{job}.validation", encode(sequence([1, 2, 3], kept)))
        await made.produce(f"{job}.features", encode(sequence([1, 2, 3], "next")))
        await made.produce(f"{job}.clean", b"{}", b"fresh")

    asyncio.run(topics())
    code, shown, _ = call(capsys, "lineage", "often")
    assert code == 0
    assert [(f["what"], f["offset"], f["details"].get("step")) for f in shown["found"]] == [
        ("trained", 1, 1),
        ("trained", 2, 2),
        ("trained", 3, 3),
        ("dropped", 7, None),
    ]
    assert shown["found"][0]["details"]["oldest_kept_checkpoint"] == made.heads[0].manifest
    assert shown["found"][3]["details"]["reason"] == "duplicate"
    for conversation, what in (
        ("bad", "dead_letter"),
        (kept, "validation"),
        ("next", "waiting"),
        ("fresh", "published"),
    ):
        code, shown, _ = call(capsys, "lineage", conversation)
        assert (code, [f["what"] for f in shown["found"]]) == (0, [what])
    code, shown, _ = call(capsys, "lineage", "nobody")
    assert (code, shown["found"]) == (1, [])
    assert call(capsys, "lineage", "best", "--as", "conversation")[0] == 1
    assert call(capsys, "lineage", "nobody", "--as", "checkpoint")[0] == 1
    assert entry.run(["lineage", "often"]) == 0
    assert "reason duplicate" in capsys.readouterr().out


PARENT = """
import subprocess, sys, time
from megaflow_stream.runtime.lifeline import Lifeline
child = subprocess.Popen(sys.argv[1:], **Lifeline().spawn_options())
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("ending", ["SIGTERM", "parent killed"])
def test_evaluate_runs_until_it_is_told_to_stop(made: Made, ending: str) -> None:
    from tests.integration.evaluation_case import model_of

    async def begin() -> None:
        async with made.store() as store:
            state = {"offsets": {f"{made.job}.features/0": 0}}
            snapshot = Snapshot(step=4, tensors=tensors_of(model_of(1.0)), state=state)
            writer = CheckpointWriter(store, made.job, definition={"tokenizer": "ab" * 32})
            head = await writer.save(snapshot, (await load(store, made.job)).head)
        for topic in ("evaluations", "status", "status.events"):
            bus = await connect(made.kafka)
            await bus.create_topic(TopicDescription(topic, 1, {}))
            await bus.close()
        await made.produce(f"{made.job}.validation", encode(sequence([1, 2, 3])))
        said = {"job": made.job, "step": 4, "manifest": head.manifest, "manifest_sha256": head.sha256}
        await made.produce("checkpoints", orjson.dumps(said), made.job.encode())

    async def promoted() -> int | None:
        async with made.store() as store:
            best = await alias.get(store, made.job, "best")
            return best.step if best else None

    asyncio.run(begin())
    command = [sys.executable, "-m", "megaflow_stream.cli.main", "evaluate", f"{made.job}_evaluation"]
    path = os.pathsep.join(p for p in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "PYTHONPATH": path}
    if ending == "SIGTERM":
        process = subprocess.Popen(command, env=environment)
        pid = process.pid
    else:
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, *command], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        pid = int(process.stdout.readline())
    try:
        deadline = time.monotonic() + 180
        while asyncio.run(promoted()) != 4:
            assert process.poll() is None, "the evaluator ended"
            assert time.monotonic() < deadline, "nothing was promoted"
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGTERM if ending == "SIGTERM" else signal.SIGKILL)
        code = process.wait(20)
        assert code == (0 if ending == "SIGTERM" else -signal.SIGKILL)
        while _alive(pid):
            assert time.monotonic() < deadline, "the evaluator outlived its parent"
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if _alive(pid):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
