"""The statistics agent as a process: what it serves, poison, and how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict

import psutil
import pytest

from megaflow_stream.bus import Bus, OutRecord, TopicDescription
from megaflow_stream.observe.dead_letters import list_letters
from megaflow_stream.observe.scan import scan
from megaflow_stream.observe.status import read_status
from megaflow_stream.processing.statistics import Counted
from megaflow_stream.processing.statistics_agent import StatisticsTopics

AGENT = """
import sys
from megaflow_stream.bus.security import Security
from megaflow_stream.processing.faust_runner import main
from megaflow_stream.processing.statistics_agent import StatisticsTopics
servers, topics = eval(sys.argv[1])
main(servers, Security(), topics=StatisticsTopics(**topics))
"""


@pytest.fixture
def names() -> StatisticsTopics:
    suffix = uuid.uuid4().hex[:8]
    return StatisticsTopics(**{field: f"{field}-{suffix}" for field in asdict(StatisticsTopics())})


@pytest.fixture
async def topics(bus: Bus, names: StatisticsTopics) -> AsyncIterator[StatisticsTopics]:
    made = [name for field, name in asdict(names).items() if field != "app"]
    for name in made:
        await bus.create_topic(TopicDescription(name, 1))
    yield names
    for name in (*made, f"{names.app}-totals-changelog"):
        await bus.delete_topic(name)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def agent(started: list[subprocess.Popen[str]], servers: str, names: StatisticsTopics) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", AGENT, repr((servers, asdict(names)))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    started.append(process)
    return process


async def test_poison_goes_to_the_dead_letters_and_the_rest_is_served(
    kafka: str, bus: Bus, topics: StatisticsTopics, started: list[subprocess.Popen[str]]
) -> None:
    counted = [
        Counted(
            processor="clean",
            topic="conversations.raw",
            partition=0,
            begin=n,
            end=n + 1,
            dataset="agent",
            producer="me",
            counts={"records": 1},
        )
        for n in range(3)
    ]
    producer = await bus.producer()
    for record in (
        OutRecord(counted[0].encode()),
        OutRecord(b"poison", b"k", [("traceparent", b"00-1-2-01")]),
        OutRecord(None),
        OutRecord(counted[1].encode()),
        OutRecord(counted[0].encode()),
        OutRecord(counted[2].encode()),
    ):
        (sent,) = await producer.send_many(topics.source, 0, [record])
        await sent
    await producer.close()
    process = agent(started, kafka, topics)
    served: dict[str, object] = {}
    while served.get("counts") != {"clean": {"records": 3}}:
        assert process.poll() is None, process.communicate()[1]
        async for record in scan(bus, topics.served):
            assert record.key == b"agent/me"
            served = json.loads(record.value or b"")
    letters, _ = await list_letters(bus, topic=topics.dead_letters)
    assert [(x.processor, x.origin_topic, x.origin_offset, x.attempt) for x in letters] == [
        ("statistics", topics.source, 1, 1),
        ("statistics", topics.source, 2, 1),
    ]
    assert not [c for c in psutil.Process(process.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    process.terminate()
    assert process.wait(10) == 0, process.communicate()[1]
    (status,) = (await read_status(bus, topic=topics.status)).values()
    assert (status["component"], status["kind"], status["state"]) == ("statistics", "statistics", "stopped")
    assert (status["ranges_added"], status["ranges_repeated"], status["dead_letters"]) == (3, 1, 2)


async def test_the_group_is_at_the_end_although_transactions_leave_gaps(
    kafka: str, bus: Bus, topics: StatisticsTopics, started: list[subprocess.Popen[str]]
) -> None:
    producer = await bus.producer(f"source-{uuid.uuid4().hex[:8]}")
    begin = 0
    for n in range(20):
        record = Counted(
            processor="clean",
            topic="conversations.raw",
            partition=0,
            begin=begin,
            end=begin + 1,
            dataset="agent",
            producer="me",
            counts={"records": 1},
        )
        await producer.begin()
        sent = await producer.send(topics.source, record.encode(), key=b"agent/me", partition=0)
        if n % 3:
            await producer.commit([sent])
            begin += 1
        else:
            await sent
            await producer.abort()
    await producer.close()
    end = max((await bus.end_offsets(await bus.partitions(topics.source))).values())
    process = agent(started, kafka, topics)
    while max((await bus.committed(topics.app)).values(), default=0) < end - 1:  # the last offset is a marker
        assert process.poll() is None, process.communicate()[1]
        await asyncio.sleep(0.1)
    async for served in scan(bus, topics.served):
        assert json.loads(served.value or b"")["counts"]["clean"]["records"] <= begin
    assert json.loads(served.value or b"")["counts"] == {"clean": {"records": begin}}


async def test_without_its_topics_it_fails_with_the_cause_on_the_last_line(
    kafka: str, names: StatisticsTopics, started: list[subprocess.Popen[str]]
) -> None:
    process = agent(started, kafka, names)
    _, errors = await asyncio.to_thread(process.communicate)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("megaflow: ")
    assert names.source in errors.splitlines()[-1]


async def test_without_a_broker_it_ends_with_3_or_at_once_when_told(
    names: StatisticsTopics, started: list[subprocess.Popen[str]]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        servers = f"127.0.0.1:{free.getsockname()[1]}"
        left, told = agent(started, servers, names), agent(started, servers, names)
        _, errors = await asyncio.to_thread(left.communicate)
        assert left.returncode == 3
        assert errors.splitlines()[-1].startswith("megaflow: ")
        told.terminate()
        await asyncio.to_thread(told.communicate)
        assert told.returncode is not None
