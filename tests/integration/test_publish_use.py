"""`megaflow publish` says first what is wrong with its use, and what it says of sizes, topics and datasets holds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from megaflow_stream.bus import Bus, TopicDescription, connect
from megaflow_stream.bus.failure import translate
from megaflow_stream.config.settings import settings
from megaflow_stream.errors import NotFound, UsageError
from megaflow_stream.processing.steps.normalise import normalise
from megaflow_stream.project import scaffold
from megaflow_stream.publishing import ledger
from megaflow_stream.publishing.publish import publish
from megaflow_stream.testing import MemoryCluster
from tests.integration.publish_case import made, read_all, write

NOBODY = "127.0.0.1:9"  # no broker is there: what gets as far as connecting exits with 3, after ten seconds


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference project, as `megaflow init` makes it."""
    return scaffold.init(tmp_path_factory.mktemp("reference") / "project")


@pytest.fixture
async def bus(kafka: str) -> AsyncIterator[Bus]:
    bus = await connect(kafka)
    yield bus
    await bus.close()


def call(project: Path, *arguments: str | Path, kafka: str = NOBODY) -> tuple[int, str, str]:
    """The command's exit code, stdout and stderr."""
    options = ["--project", project, "--bootstrap-servers", kafka]
    command = [sys.executable, "-m", "megaflow_stream.cli.main", "publish", *arguments, *options]
    done = subprocess.run(command, capture_output=True, timeout=120, text=True)
    return done.returncode, done.stdout, done.stderr


def test_rejects_that_cannot_be_written_are_refused_first(reference: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", made(1))
    for rejects, said in (
        (tmp_path / "none" / "r.jsonl", f"there is no folder {tmp_path / 'none'}"),
        (path / "r.jsonl", f"there is no folder {path}"),
        (path, "would overwrite the input"),
    ):
        code, _, errors = call(reference, path, "--rejects", rejects)
        assert (code, said in errors.splitlines()[-1]) == (2, True), errors


async def test_rejects_that_cannot_be_written_in_a_program(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", made(1))
    for rejects in (tmp_path / "none" / "r", tmp_path):
        with pytest.raises(UsageError, match="cannot be written"):
            await publish(MemoryCluster().bus(), [path], rejects=rejects)


def test_a_dry_run_knows_the_size_that_the_topic_is_declared_to_take(reference: Path, tmp_path: Path) -> None:
    sizes = (7 << 20, 9 << 20)
    path = write(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "x" * size}]} for size in sizes])
    code, out, errors = call(reference, path, "--dry-run", "--json")
    report = orjson.loads(out)
    assert (code, report["published"], report["rejected"]) == (1, 1, 1), errors
    assert report["rejects"][0]["line"] == 2
    assert f"the topic takes {8 << 20} (`max_message` of its YAML)" in report["rejects"][0]["reason"]
    assert "\nmax_message: 8MiB\n" in (reference / "topics" / "conversations.raw.yaml").read_text()
    report = orjson.loads(call(reference, path, "--dry-run", "--json", "--topic", "my.own")[1])
    assert (report["published"], report["rejected"]) == (0, 2), "what is not declared has Kafka's default"


@pytest.mark.parametrize("topic", ["status", "conversations.clean", ledger.TOPIC, "features.agent"])
def test_a_topic_that_is_for_something_else_is_refused(reference: Path, tmp_path: Path, topic: str) -> None:
    path = write(tmp_path / "in.jsonl", made(1))
    code, _, errors = call(reference, path, "--topic", topic)
    assert code == 2, errors
    assert f"--topic {topic} is for something else" in errors.splitlines()[-1]
    assert "take conversations from conversations.raw;" in errors


def test_topics_that_are_read_and_topics_of_your_own_are_not_refused(reference: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", made(1))
    for topic in ("conversations.raw", "my.own"):
        assert call(reference, path, "--topic", topic, "--dry-run")[0] == 0


async def test_before_topics_apply_one_sentence_says_what_to_do(
    bus: Bus, kafka: str, reference: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", made(1))
    name = f"none-{os.urandom(4).hex()}"
    code, _, errors = call(reference, path, "--topic", name, kafka=kafka)
    assert code == 1
    assert errors.splitlines() == [
        "what to do: `megaflow topics apply` creates the project's topics",
        f"error: asking for partitions: there is no such topic (topic {name})",
    ]
    with pytest.raises(NotFound):
        await publish(bus, [path], topic=name)


async def test_a_documents_own_dataset_is_metadata(tmp_path: Path) -> None:
    """The header says where it is published to; what a document says of its origin stays with it."""
    cluster = MemoryCluster({"raw": 1, ledger.TOPIC: 1})
    document = {**made(1)[0], "dataset": "theirs"}
    await publish(cluster.bus(), [write(tmp_path / "a", [document])], topic="raw", dataset="ours")
    (record,) = await read_all(cluster.bus(), "raw")
    assert (dict(record.headers)["dataset"], record.value) == (b"ours", orjson.dumps(document))
    found = normalise(record.value, key=record.key, dataset="ours")
    assert (found.dataset, found.metadata["dataset"]) == ("ours", "theirs")
    (setting,) = [setting for setting in settings() if setting.name == "publish.dataset"]
    assert "metadata" in setting.doc


async def test_the_same_id_with_other_content_is_counted_in_one_run_only(tmp_path: Path) -> None:
    cluster = MemoryCluster({"raw": 1, ledger.TOPIC: 1})
    one, two = made(2)
    counts = []
    for documents in ([one], [{**two, "id": one["id"]}]):
        report = await publish(cluster.bus(), [write(tmp_path / "a", documents)], topic="raw")
        counts.append((report.published, report.same_id_other_content))
    assert counts == [(1, 0), (1, 0)]
    helped = subprocess.run(
        [sys.executable, "-m", "megaflow_stream.cli.main", "publish", "--help"], capture_output=True, text=True
    ).stdout
    assert "share an id and differ are all published; those of one command are counted" in " ".join(helped.split())


async def test_a_file_that_changed_before_its_end_is_published_again_from_there(tmp_path: Path) -> None:
    """As --help says: de-duplication removes the doubles."""
    cluster = MemoryCluster({"raw": 1, ledger.TOPIC: 1})
    documents = made(3500)
    path = tmp_path / "a"
    await publish(cluster.bus(), [write(path, documents)], topic="raw")
    changed = [*documents[:1500], *made(1, seed=9), *documents[1500:]]
    report = await publish(cluster.bus(), [write(path, changed)], topic="raw")
    assert (report.published, report.already_published) == (2001, 1500)


async def test_a_record_that_the_topic_refuses_says_the_key_of_its_yaml(bus: Bus) -> None:
    name = f"small-{os.urandom(4).hex()}"
    await bus.create_topic(TopicDescription(name, 1, {"max.message.bytes": "2000"}))
    cluster = MemoryCluster()
    cluster.create(name, 1, {"max.message.bytes": "2000"})
    for each in (bus, cluster.bus()):
        producer = await each.producer()
        sent = await producer.send(name, b"x" * 3000, partition=0)
        (failure,) = await asyncio.gather(sent, return_exceptions=True)
        assert isinstance(failure, Exception)
        assert translate(failure, "sending").hint.startswith("raise `max_message` in the topic's YAML")
        await producer.close()
    await bus.delete_topic(name)
