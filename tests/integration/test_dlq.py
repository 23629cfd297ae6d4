"""Dead letters and tail, by their functions and by the commands, on a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from megaflow_stream.bus import Bus, OutRecord, TopicDescription
from megaflow_stream.errors import NotFound, UsageError
from megaflow_stream.observe.dead_letters import list_letters, show_letter
from megaflow_stream.observe.tail import describe, tail


@pytest.fixture
async def topic(bus: Bus) -> AsyncIterator[str]:
    name = f"dlq-{uuid.uuid4().hex[:8]}"
    await bus.create_topic(TopicDescription(name, 2))
    producer = await bus.producer()
    for n in range(10):
        origin = {
            "origin-topic": "conversations.raw" if n % 2 else "conversations.clean",
            "origin-partition": "1",
            "origin-offset": str(n),
            "processor": "clean" if n % 2 else "features",
            "error": "not JSON: line 1" if n < 5 else "no messages",
            "attempt": "3",
            "conversation": f"c{n}",
            "traceparent": "00-1-2-01",
        }
        headers = [(key, value.encode()) for key, value in origin.items()]
        value = b'{"n": %d}' % n if n else b"\xff\x00"
        await (await producer.send(name, value, key=b"c%d" % n, partition=n % 2, headers=headers))
    (sent,) = await producer.send_many(
        name, 0, [OutRecord(None)]
    )  # of a foreign writer: neither key, value nor headers
    await sent
    await producer.close()
    yield name
    await bus.delete_topic(name)


async def test_letters_are_listed_by_what_is_asked_for(bus: Bus, topic: str) -> None:
    found, total = await list_letters(bus, topic=topic)
    assert total == len(found) == 11
    assert (found[0].id, found[0].processor, found[0].origin_offset, found[0].attempt) == ("0/0", "features", 0, 3)
    foreign = next(letter for letter in found if letter.id == "0/5")
    assert (foreign.processor, foreign.origin_partition) == (None, None)
    found, total = await list_letters(bus, topic=topic, limit=2, processor="clean", error="NO MESS")
    assert ([letter.conversation for letter in found], total) == (["c7", "c9"], 3)
    found, _ = await list_letters(bus, topic=topic, origin="conversations.clean", error="json")
    assert [letter.conversation for letter in found] == ["c0", "c2", "c4"]
    assert await list_letters(bus, topic="not-" + topic) == ([], 0)


async def test_a_letter_is_shown_as_it_came(bus: Bus, topic: str) -> None:
    letter = await show_letter(bus, 1, 0, topic=topic)
    assert (letter["key"], letter["value"]) == ("c1", {"n": 1})
    assert letter["headers"]["traceparent"] == "00-1-2-01"
    assert (await show_letter(bus, 0, 0, topic=topic))["value"] == {"base64": "/wA="}
    for place in ((0, 6), (0, 99), (7, 0)):
        with pytest.raises(NotFound, match="no dead letter"):
            await show_letter(bus, *place, topic=topic)


@pytest.mark.parametrize(
    ("begin", "count", "offsets"),
    [
        ("beginning", None, [0, 1, 2, 3, 4]),
        ("beginning", 2, [0, 1]),
        ("3", None, [3, 4]),
        ("-2", None, [3, 4]),
        ("-99", None, [0, 1, 2, 3, 4]),
        ("end", None, []),
        ("99", None, []),
        ("beginning", 0, []),
    ],
)
async def test_tail_begins_where_it_is_told(
    bus: Bus, topic: str, begin: str, count: int | None, offsets: list[int]
) -> None:
    found = [r.offset async for r in tail(bus, topic, begin=begin, count=count, until_end=True, partitions=[1])]
    assert found == offsets


async def test_tail_from_the_end_counts_records_not_offsets(bus: Bus, topic: str) -> None:
    producer = await bus.producer(f"dlq-{uuid.uuid4().hex}")
    for _ in range(3):
        await producer.begin()
        await (await producer.send(topic, b"aborted", partition=1))
        await producer.abort()
    await producer.close()
    found = [describe(r) async for r in tail(bus, topic, begin="-2", until_end=True, partitions=[1])]
    assert [record["value"] for record in found] == [{"n": 7}, {"n": 9}]


async def test_tail_goes_on_with_what_comes(bus: Bus, topic: str) -> None:
    producer = await bus.producer()
    records = tail(bus, topic, begin="-1", count=3, partitions=[1])
    assert (await anext(records)).value == b'{"n": 9}'
    await (await producer.send(topic, b"one", partition=1))
    assert (await anext(records)).value == b"one"
    await (await producer.send(topic, b"two", partition=1))
    assert [record.value async for record in records] == [b"two"]
    await records.aclose()
    await producer.close()


async def test_a_wrong_place_is_refused(bus: Bus, topic: str) -> None:
    with pytest.raises(UsageError, match="begining"):
        await anext(tail(bus, topic, begin="begining"))
    with pytest.raises(NotFound):
        await anext(tail(bus, topic, partitions=[5]))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pipeline.yaml").write_text("pipeline: []\n")
    return tmp_path


def megaflow(project: Path, kafka: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megaflow_stream.cli.main", *arguments, "--bootstrap-servers", kafka]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60, check=False)


def test_the_commands_print_data_on_stdout(project: Path, kafka: str, topic: str) -> None:
    done = megaflow(project, kafka, "status", "tail", topic, "-o", "-1", "-e", "-p", "1")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    record = json.loads(line)
    assert (record["key"], record["value"], record["partition"], record["offset"]) == ("c9", {"n": 9}, 1, 4)
    done = megaflow(project, kafka, "status", "tail", "not-" + topic, "-e")
    assert (done.returncode, done.stdout) == (1, "")
    done = megaflow(project, kafka, "dlq", "show", "nonsense")
    assert done.returncode == 2
    done = megaflow(project, kafka, "dlq", "list", "--processor", "nobody-" + topic, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [])


def test_replay_says_that_it_comes_later(project: Path, kafka: str) -> None:
    done = megaflow(project, kafka, "dlq", "replay")
    assert done.returncode == 2
    assert "not in this version yet" in done.stderr
