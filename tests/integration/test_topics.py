"""Declared topics on a real Kafka: made once, changed in place, never shrunk, what others made left alone."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from megaflow_stream.bus.api import Bus, TopicDescription
from megaflow_stream.bus.connect import connect
from megaflow_stream.cli import main as entry
from megaflow_stream.definitions.topic import Topic
from megaflow_stream.errors import BusError
from megaflow_stream.project.topics import Change, apply, diff, is_faust
from megaflow_stream.testing import MemoryBus

PREFIX = f"topics-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def bus(kafka: str) -> AsyncIterator[Bus]:
    bus = await connect(kafka)
    yield bus
    for name in await bus.topics():
        if PREFIX in name:
            await bus.delete_topic(name)
    await bus.close()


@pytest.fixture
def topic() -> Topic:
    return Topic(
        name=f"{PREFIX}.{uuid.uuid4().hex[:8]}",
        partitions=2,
        cleanup="compact",
        segment_bytes=4 << 20,
        max_message_bytes=3 << 20,
    )


async def changes(bus: Bus, *topics: Topic) -> list[Change]:
    """The changes that are about this test's topics."""
    names = {topic.name for topic in topics}
    return [change for change in await diff(bus, topics) if change.topic in names]


async def by_hand_made(bus: Bus, topic: TopicDescription) -> None:
    """As another tool would; back when the broker shows it."""
    await bus.create_topic(topic)
    while topic.name not in await bus.topics():
        pass


async def test_topics_are_made_once(bus: Bus, topic: Topic) -> None:
    first = await changes(bus, topic)
    assert [change.action for change in first] == ["create"]
    assert await apply(bus, first, dry_run=True) == first
    assert topic.name not in await bus.topics()
    assert await apply(bus, first) == first
    made = (await bus.topics())[topic.name]
    assert made.partitions == 2
    assert made.configs == topic.configs()
    assert await changes(bus, topic) == []
    assert await apply(bus, first) == []  # another process was first


async def test_settings_are_changed_and_others_kept(bus: Bus, topic: Topic) -> None:
    by_hand = {"min.compaction.lag.ms": "5000"}
    configs = topic.configs() | by_hand | {"retention.ms": "1000"}
    await by_hand_made(bus, TopicDescription(name=topic.name, partitions=2, configs=configs))
    (change,) = found = await changes(bus, topic)
    assert (change.action, change.detail) == ("configure", "retention.ms 1000 -> -1")
    await apply(bus, found)
    assert (await bus.topics())[topic.name].configs == topic.configs() | by_hand
    assert await changes(bus, topic) == []


async def test_a_topic_made_by_hand_gets_what_is_declared(bus: Bus, topic: Topic) -> None:
    await by_hand_made(bus, TopicDescription(name=topic.name, partitions=2))
    (change,) = found = await changes(bus, topic)
    assert "cleanup.policy the default -> compact" in change.detail
    await apply(bus, found)
    assert await changes(bus, topic) == []


async def test_partitions_grow_and_never_shrink(bus: Bus, topic: Topic) -> None:
    await apply(bus, await changes(bus, topic))
    wider = replace(topic, partitions=4, key="conversation id")
    (change,) = found = await changes(bus, wider)
    assert change.action == "extend"
    assert change.detail.startswith("2 -> 4 partitions; records with a conversation id move")
    await apply(bus, found)
    assert (await bus.topics())[topic.name].partitions == 4
    (change,) = found = await changes(bus, topic)
    assert (change.action, change.drift) == ("refused", True)
    assert "never shrink" in change.detail
    assert await apply(bus, found) == []
    assert (await bus.topics())[topic.name].partitions == 4


async def test_what_others_made_is_listed_and_no_drift(bus: Bus, topic: Topic) -> None:
    names = [f"{PREFIX}.table-changelog", f"megaflow.statistics-{PREFIX}", f"{PREFIX}.of-somebody"]
    for name in names:
        await by_hand_made(bus, TopicDescription(name=name, partitions=1))
    found = {change.topic: change for change in await diff(bus, [topic])}
    assert [found[name].action for name in names] == ["faust", "faust", "undeclared"]
    assert not any(found[name].drift for name in names)
    await apply(bus, list(found.values()))
    assert set(names) < set(await bus.topics())


def test_names_that_faust_makes() -> None:
    assert is_faust("megaflow.statistics-totals-changelog")
    assert is_faust("megaflow.statistics-__assignor-__leader")
    assert not is_faust("dataset.statistics")


async def test_the_commands(
    bus: Bus, topic: Topic, kafka: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megaflow_stream.runtime.connection")
    (tmp_path / "pipeline.yaml").write_text("pipeline:\n  - name: a\n")
    (tmp_path / "topics").mkdir()
    (tmp_path / "topics" / "one.yaml").write_text(
        f"name: {topic.name}\npartitions: 3\nretention: 2d\npurpose: A test.\n"
    )

    async def megaflow(*arguments: str) -> tuple[int, str, str]:
        options = ["--project", str(tmp_path), "--bootstrap-servers", kafka]
        code = await asyncio.to_thread(entry.run, ["topics", *arguments, *options])
        return code, *capsys.readouterr()

    assert (await megaflow("diff"))[0] == 1
    code, out, _ = await megaflow("apply", "--dry-run", "--json")
    assert (code, json.loads(out)["made"][0]["topic"]) == (0, topic.name)
    assert (await megaflow("diff"))[0] == 1
    assert (await megaflow("apply"))[0] == 0
    code, out, err = await megaflow("apply", "--json")
    assert (code, json.loads(out)) == (0, {"dry_run": False, "made": [], "refused": []})
    assert "nothing to do" in err
    code, out, err = await megaflow("diff", "--json")
    assert code == 0
    assert not any(change["drift"] for change in json.loads(out))
    assert "as declared" in err
    code, out, _ = await megaflow("list", "--json")
    (line,) = [line for line in json.loads(out) if line["topic"] == topic.name]
    assert (line["partitions"], line["retention"], line["state"]) == (3, "2d", "as declared")
    (tmp_path / "topics" / "one.yaml").write_text(f"name: {topic.name}\npartitions: 1\nretention: 2d\n")
    assert (await megaflow("apply"))[0] == 1
    code, out, _ = await megaflow("list")
    assert code == 0
    assert "differs" in next(line for line in out.splitlines() if line.startswith(topic.name)).split()


class Forgetful(MemoryBus):
    """Confirms every change and shows none."""

    async def topics(self) -> dict[str, TopicDescription]:
        return {}


class Hurried:
    """A clock on which waiting takes no time."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


async def test_a_change_that_never_shows_is_an_error(topic: Topic) -> None:
    bus = Forgetful()
    with pytest.raises(BusError, match="does not show it") as caught:
        await apply(bus, await diff(bus, [topic]), clock=Hurried())
    assert caught.value.where == {"topic": topic.name}
    assert caught.value.retriable
