"""The statistics agent under kill -9 and SIGSTOP: its figures stay exact.

An agent kills itself at a seeded place of its own sequence, while transactions, aborted ones and ranges that come
twice flow in; another one follows. The last one lives, and what it serves is compared with what was committed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import IO

import orjson
import pytest

from megaflow_stream.bus import Bus, Producer, TopicDescription
from megaflow_stream.observe.scan import scan
from megaflow_stream.processing.statistics import Counted
from megaflow_stream.processing.statistics_agent import StatisticsTopics

SEED = int(os.environ.get("MEGAFLOW_TEST_SEED", "7"))
KILLS = int(os.environ.get("MEGAFLOW_FAULT_COUNT", "7"))  # every place once; 20 and more on demand
PLACES = ("owned", "flush", "flushed", "begun", "sent", "committed", "taken")
PARTITIONS = 4
KEYS = [("agent", "alice"), ("agent", "bob"), ("tools/v2", "alice")]

# Sends itself a signal at the count-th time that it comes to a place. One without a place takes its time to seek what
# was committed, and fails if it works before: what Faust has queued by then is lost.
AGENT = """
import asyncio, os, signal, sys, threading
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread
from megaflow_stream.bus.security import Security
from megaflow_stream.processing import faust_runner
from megaflow_stream.processing.statistics_agent import StatisticsAgent, StatisticsTopics

servers, topics, place, count, number = eval(sys.argv[1])
left = count

def at(name):
    global left
    if name == place:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)

def around(owner, name, before=None, after=None):
    inner = getattr(owner, name)
    async def outer(*arguments, **options):
        if before: at(before)
        result = await inner(*arguments, **options)
        if after: at(after)
        return result
    setattr(owner, name, outer)

def watched(agent, bus, topics, table, flush, status, **options):
    async def flushed():
        at("flush")
        await flush()
        at("flushed")
    built(agent, bus, topics, table, flushed, status, **options)
    around(agent, "take", after="taken")
    own = agent._own
    async def owned():
        assert sought.is_set(), "works before its consumer has sought what was committed"
        owner = await own()
        if not hasattr(owner, "watched"):
            owner.watched = True
            around(owner, "begin", after="begun")
            around(owner, "commit", before="sent", after="committed")
        at("owned")
        return owner
    agent._own = owned

async def seeking(thread):
    found = await seek(thread)
    if not (place or sought.is_set()):
        await asyncio.sleep(1.5)  # Faust asks for records once a second
    sought.set()
    return found

sought = threading.Event()
seek, AIOKafkaConsumerThread.seek_to_committed = AIOKafkaConsumerThread.seek_to_committed, seeking
built = StatisticsAgent.__init__
StatisticsAgent.__init__ = watched
faust_runner.main(servers, Security(), topics=StatisticsTopics(**topics))
"""


class Source:
    """Writes ranges as processors do, and knows what was committed."""

    def __init__(self, producer: Producer, topic: str, chance: random.Random) -> None:
        self.producer, self.topic, self.chance = producer, topic, chance
        self.next = dict.fromkeys(range(PARTITIONS), 0)
        self.expected: dict[tuple[str, str], dict[str, dict[str, int]]] = {}
        self.last: list[tuple[int, Counted]] = []

    async def transaction(self) -> None:
        """One batch of one partition, now and then aborted, now and then written twice."""
        partition = self.chance.randrange(PARTITIONS)
        begin = self.next[partition] + self.chance.choice((0, 0, 3))  # offsets have gaps
        end = begin + self.chance.randrange(1, 50)
        batch = [
            Counted(
                processor=self.chance.choice(("clean", "features")),
                topic="raw",
                partition=partition,
                begin=begin,
                end=end,
                dataset=dataset,
                producer=producer,
                counts={"records": self.chance.randrange(1, 9), "dropped": self.chance.randrange(3)},
            )
            for dataset, producer in self.chance.sample(KEYS, self.chance.randrange(1, len(KEYS) + 1))
        ]
        abort = self.chance.random() < 0.2
        again = self.last if self.chance.random() < 0.2 else []
        await self.producer.begin()
        sent = [await self._send(partition, counted) for counted in batch]
        sent += [await self._send(to, counted) for to, counted in again]
        if abort:
            await asyncio.gather(*sent)
            await self.producer.abort()
            return
        await self.producer.commit(sent)
        self.next[partition] = end
        self.last = [(partition, counted) for counted in batch]
        for counted in batch:
            counts = self.expected.setdefault((counted.dataset, counted.producer), {})
            mine = counts.setdefault(counted.processor, {})
            for name, count in counted.counts.items():
                mine[name] = mine.get(name, 0) + count

    async def _send(self, partition: int, counted: Counted) -> asyncio.Future[object]:
        return await self.producer.send(self.topic, counted.encode(), key=counted.key.encode(), partition=partition)  # type: ignore[return-value]


@pytest.fixture
async def topics(bus: Bus) -> StatisticsTopics:
    suffix = uuid.uuid4().hex[:8]
    names = StatisticsTopics(
        app=f"statistics-{suffix}",
        source=f"processing-{suffix}",
        served=f"served-{suffix}",
        dead_letters=f"dlq-{suffix}",
        status=f"status-{suffix}",
        events=f"events-{suffix}",
    )
    compact = {"cleanup.policy": "compact"}
    await bus.create_topic(TopicDescription(names.source, PARTITIONS))
    await bus.create_topic(TopicDescription(names.served, 1, compact))
    await bus.create_topic(TopicDescription(names.status, 1, compact))
    for name in (names.dead_letters, names.events):
        await bus.create_topic(TopicDescription(name, 1))
    return names


_started: list[subprocess.Popen[bytes]] = []
_said: dict[int, IO[bytes]] = {}


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """Frozen agents, too, end with their test."""
    yield
    while _started:
        agent = _started.pop()
        agent.kill()
        agent.wait()
        _said.pop(agent.pid).close()


def start(
    kafka: str, topics: StatisticsTopics, place: str = "", count: int = 0, number: int = signal.SIGKILL
) -> subprocess.Popen[bytes]:
    arguments = repr((kafka, asdict(topics), place, count, int(number)))
    log = tempfile.TemporaryFile()  # noqa: SIM115  a pipe that nobody reads would hold the agent up
    _started.append(subprocess.Popen([sys.executable, "-c", AGENT, arguments], stderr=log))
    _said[_started[-1].pid] = log
    return _started[-1]


def said(agent: subprocess.Popen[bytes]) -> str:
    """What the agent wrote to stderr."""
    log = _said[agent.pid]
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


async def served(bus: Bus, topics: StatisticsTopics) -> dict[tuple[str, str], dict[str, dict[str, int]]]:
    found = {}
    async for record in scan(bus, topics.served):
        document = orjson.loads(record.value or b"")
        found[document["dataset"], document["producer"]] = document["counts"]
    return found


async def until_served(bus: Bus, topics: StatisticsTopics, source: Source, agent: subprocess.Popen[bytes]) -> None:
    """Until exactly what was committed is served; more than that is an error at once."""
    while (found := await served(bus, topics)) != source.expected:
        for key, counts in found.items():
            for processor, names in counts.items():
                for name, count in names.items():
                    assert count <= source.expected[key][processor][name], "counted twice"
        assert agent.poll() is None, said(agent)
        await asyncio.sleep(0.2)


@pytest.mark.timeout(900)
async def test_figures_are_exact_after_kills_at_seeded_places(kafka: str, bus: Bus, topics: StatisticsTopics) -> None:
    chance = random.Random(SEED)
    producer = await bus.producer(f"source-{uuid.uuid4().hex[:8]}")
    source = Source(producer, topics.source, chance)
    for _ in range(20):
        await source.transaction()
    for kill in range(KILLS):
        place, count = PLACES[kill % len(PLACES)], chance.randrange(1, 4)
        agent = start(kafka, topics, place, count)
        while agent.poll() is None:
            await source.transaction()
            await asyncio.sleep(0.05)
        assert agent.returncode == -signal.SIGKILL, (place, count, said(agent))
    last = start(kafka, topics)
    await until_served(bus, topics, source, last)
    for _ in range(20):
        await source.transaction()
    await until_served(bus, topics, source, last)
    last.terminate()
    assert last.wait(15) == 0, said(last)
    await producer.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["owned", "flush", "begun"])
async def test_an_agent_that_thaws_after_another_has_taken_over_changes_nothing(
    kafka: str, bus: Bus, topics: StatisticsTopics, place: str
) -> None:
    chance = random.Random(SEED)
    producer = await bus.producer(f"source-{uuid.uuid4().hex[:8]}")
    source = Source(producer, topics.source, chance)
    frozen = start(kafka, topics, place, 2, signal.SIGSTOP)
    while "T" not in _state(frozen.pid):
        await source.transaction()
        await asyncio.sleep(0.05)
    second = start(kafka, topics)
    await until_served(bus, topics, source, second)
    for _ in range(10):
        await source.transaction()
    await until_served(bus, topics, source, second)
    frozen.send_signal(signal.SIGCONT)
    while frozen.poll() is None:
        await asyncio.sleep(0.1)
    assert frozen.returncode not in (0, -signal.SIGSTOP)
    assert said(frozen).splitlines()[-1].startswith("megaflow: ")
    assert await served(bus, topics) == source.expected
    second.kill()
    third = start(kafka, topics)  # restores from the changelog that the thawed one may have written
    for _ in range(10):
        await source.transaction()
    await until_served(bus, topics, source, third)
    third.terminate()
    assert third.wait(15) == 0, said(third)
    await producer.close()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]
