"""`megaflow publish` as a program: its messages, its data, its exit codes, and kill -9."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from megaflow_stream.bus import Bus, TopicDescription, connect
from megaflow_stream.conversations import synthetic
from megaflow_stream.publishing import ledger
from tests.integration.publish_case import lines, made, read_all

GOOD = b'{"messages":[{"role":"user","content":"Hi"}]}'


@pytest.fixture
async def bus(kafka: str) -> AsyncIterator[Bus]:
    bus = await connect(kafka)
    await bus.create_topic(TopicDescription(ledger.TOPIC, 1, {"cleanup.policy": "compact"}))
    yield bus
    await bus.close()


@pytest.fixture
async def topic(bus: Bus) -> AsyncIterator[str]:
    name = f"raw-{os.urandom(4).hex()}"
    await bus.create_topic(TopicDescription(name, 4))
    yield name
    await bus.delete_topic(name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pipeline.yaml").write_text("pipeline: []\n")
    return folder


def command(project: Path, kafka: str, *arguments: str | Path) -> list[str]:
    options = ["--project", str(project), "--bootstrap-servers", kafka]
    return [sys.executable, "-m", "megaflow_stream.cli.main", "publish", *map(str, arguments), *options]


def call(project: Path, kafka: str, *arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(project, kafka, *arguments), input=stdin, capture_output=True, timeout=120)


async def test_good_and_bad_records(bus: Bus, kafka: str, topic: str, project: Path, tmp_path: Path) -> None:
    path, rejects = tmp_path / "in.jsonl", tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + b"\n{broken\n" + b"[]\n" * 24)
    done = call(project, kafka, path, "--topic", topic, "--rejects", rejects, "--json")
    assert done.returncode == 1, done.stderr
    report = orjson.loads(done.stdout)
    assert (report["published"], report["rejected"]) == (1, 25)
    said = done.stderr.decode().splitlines()
    assert len([line for line in said if line.startswith(f"bad record: {path}:")]) == 20
    assert f"bad record: {path}:2: not JSON" in done.stderr.decode()
    assert "and 5 more bad records" in said
    assert f"all 25 are in {rejects}" in said
    assert len(rejects.read_bytes().splitlines()) == 25
    assert [record.value for record in await read_all(bus, topic)] == [GOOD]

    again = call(project, kafka, path, "--topic", topic, "--skip-bad")
    assert again.returncode == 0
    assert b"0 conversations published" in again.stdout
    assert b"1 had been published before" in again.stdout


async def test_standard_input(bus: Bus, kafka: str, topic: str, project: Path) -> None:
    done = call(project, kafka, "-", "--topic", topic, "--producer", "pipe", stdin=GOOD + b"\n")
    assert done.returncode == 0, done.stderr
    (record,) = await read_all(bus, topic)
    assert dict(record.headers)["producer"] == b"pipe"


def test_the_samples_dry(project: Path) -> None:
    done = call(project, "127.0.0.1:9", Path(synthetic.__file__).parents[2] / "topics/samples", "--dry-run", "--json")
    assert done.returncode == 1
    assert orjson.loads(done.stdout)["published"] > 900


def test_wrong_use_is_said_before_anything_is_done(project: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(GOOD)
    for arguments, said in (
        (["none.json"], b"there is no file none.json"),
        ([tmp_path / "a", "--format", "alpaca"], b"known are auto, openai_chat"),
        ([tmp_path / "a", "--dataset", "a b"], b"--dataset must be"),
    ):
        done = call(project, "127.0.0.1:9", *arguments)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    done = call(project, "127.0.0.1:9", tmp_path / "a")
    assert done.returncode == 3, done.stderr


async def test_kill_9_and_repeated_it_has_the_effect_of_once(
    bus: Bus, kafka: str, topic: str, project: Path, tmp_path: Path
) -> None:
    """Killed as soon as the topic holds this many records, committed or not, then run to its end."""
    await bus.alter_topic(topic, {"max.message.bytes": str(8 << 20)})
    documents = made(16_000)
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines(documents))
    partitions = await bus.partitions(topic)
    kills = 0
    for wanted in sorted(random.Random(5).sample(range(1, 12_000), 3)):
        with open(tmp_path / "log", "ab") as log:
            arguments = command(project, kafka, path, "--topic", topic)
            process = await asyncio.create_subprocess_exec(*arguments, stdout=log, stderr=log)
        while process.returncode is None:
            ends = await bus.end_offsets(partitions, isolation="read_uncommitted")
            if sum(ends.values()) >= wanted:
                process.kill()
                break
            await asyncio.sleep(0)
        kills += await process.wait() == -signal.SIGKILL
    done = call(project, kafka, path, "--topic", topic, "--json")
    assert done.returncode == 0, done.stderr
    report = orjson.loads(done.stdout)
    assert report["published"] + report["already_published"] == 16_000
    assert kills >= 1, (tmp_path / "log").read_text()
    records = await read_all(bus, topic)
    assert Counter(record.value for record in records) == Counter(map(orjson.dumps, documents))
