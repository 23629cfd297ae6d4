"""`publish -` interrupted, killed, and beside others: nothing hangs, nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import sys
import termios
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import orjson
import pytest

from megaflow_stream.bus import Bus, Record, TopicDescription, connect
from megaflow_stream.conversations import synthetic
from megaflow_stream.publishing import ledger
from megaflow_stream.publishing.outlet import Batch, Outlet
from megaflow_stream.publishing.record import Recorder

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
    await bus.create_topic(TopicDescription(name, 2))
    yield name
    await bus.delete_topic(name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pipeline.yaml").write_text("pipeline: []\n")
    return tmp_path


def documents(count: int, seed: int = 0) -> list[bytes]:
    return [orjson.dumps(document) for document in synthetic.documents(count, seed)]


async def started(project: Path, kafka: str, *arguments: str) -> Process:
    """`megaflow publish -` with a pipe on its standard input."""
    options = ["--project", str(project), "--bootstrap-servers", kafka]
    command = ["-m", "megaflow_stream.cli.main", "publish", "-", *arguments, *options]
    return await asyncio.create_subprocess_exec(sys.executable, *command, stdin=PIPE, stdout=PIPE, stderr=PIPE)


async def taken(process: Process, data: bytes) -> None:
    """Writes into a process's standard input; returns when it has read all of it."""
    assert process.stdin is not None
    process.stdin.write(data)
    await process.stdin.drain()
    pipe = process.stdin.get_extra_info("pipe").fileno()
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)) != (0,):
        assert process.returncode is None, (await process.communicate())[1].decode()
        await asyncio.sleep(0.01)


async def committed(bus: Bus, topic: str) -> list[Record]:
    """What a reader of committed records sees, once no transaction is open any more."""
    partitions = await bus.partitions(topic)
    ends = await bus.end_offsets(partitions, isolation="read_uncommitted")
    reader = await bus.reader()
    found: list[Record] = []
    reader.assign(dict.fromkeys(partitions, 0))
    while any([await reader.position(p) < ends[p] for p in partitions]):
        for records in (await reader.fetch()).values():
            found += records
    await reader.close()
    return found


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "into Kafka"])
async def test_ctrl_c_while_standard_input_gives_nothing(
    bus: Bus, kafka: str, topic: str, project: Path, dry: bool
) -> None:
    process = await started(project, kafka, "--topic", topic, *(["--dry-run"] if dry else []))
    await taken(process, GOOD + b"\n")
    process.send_signal(signal.SIGINT)
    said = (await asyncio.wait_for(process.stderr.read(), 60)).decode()  # type: ignore[union-attr]
    assert (await process.wait(), said.splitlines()[-1]) == (130, "interrupted"), said
    assert await committed(bus, topic) == []


async def test_two_publish_from_standard_input_at_once(bus: Bus, kafka: str, topic: str, project: Path) -> None:
    mine, yours = documents(1000, 1), documents(1000, 2)
    processes = [await started(project, kafka, "--topic", topic, "--json") for _ in range(2)]
    for process, given in zip(processes, (mine, yours), strict=True):
        await taken(process, b"\n".join(given[:500]) + b"\n")
    for process, given in zip(processes, (mine, yours), strict=True):
        out, said = await process.communicate(b"\n".join(given[500:]))
        assert process.returncode == 0, said.decode()
        assert orjson.loads(out)["published"] == 1000
    assert Counter(record.value for record in await committed(bus, topic)) == Counter(mine + yours)


# Killed in the middle of a transaction, at an exact place. The transaction stays open until the broker times it out:
# the repetition is another process with another transactional id, so it does not end it.
KILLED = """
import asyncio, os, signal, sys
from megaflow_stream.bus import connect
from megaflow_stream.publishing import publish as publishing

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Bus:
    def __init__(self, bus): self.bus = bus
    def __getattr__(self, name): return getattr(self.bus, name)
    async def producer(self, transactional_id):
        producer = await self.bus.producer(transactional_id, transaction_timeout_seconds=5)
        send_many, commit = producer.send_many, producer.commit
        async def sending(topic, partition, records):
            if topic == "publish.ledger" and place == "records sent":
                await asyncio.gather(*sent)
                die()
            sent.extend(futures := await send_many(topic, partition, records))
            return futures
        async def committing(futures):
            await asyncio.gather(*futures)
            if place == "entries sent":
                die()
            await commit([])
            die()
        producer.send_many, producer.commit = sending, committing
        return producer

servers, topic, place = sys.argv[1:]
sent = []

async def main():
    await publishing.publish(Bus(await connect(servers)), ["-"], topic=topic)

asyncio.run(main())
"""


@pytest.mark.parametrize("place", ["records sent", "entries sent", "committed"])
async def test_kill_9_in_a_transaction_and_another_process_repeats_it(
    bus: Bus, kafka: str, topic: str, project: Path, place: str
) -> None:
    given = documents(300)
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, kafka, topic, place, stdin=PIPE, stderr=PIPE
    )
    _, said = await killed.communicate(b"\n".join(given))
    assert killed.returncode == -signal.SIGKILL, said.decode()
    partitions = await bus.partitions(topic)
    assert sum((await bus.end_offsets(partitions, isolation="read_uncommitted")).values()) >= 300

    again = await started(project, kafka, "--topic", topic, "--json")
    out, said = await again.communicate(b"\n".join(given))
    assert again.returncode == 0, said.decode()
    report = orjson.loads(out)
    done = 300 if place == "committed" else 0
    assert (report["published"], report["already_published"]) == (300 - done, done)
    assert Counter(record.value for record in await committed(bus, topic)) == Counter(given)


async def test_a_publish_cancelled_in_a_transaction_ends_it(bus: Bus, topic: str) -> None:
    """Left open it would hold up every reader of the topic until the broker ends it, after a minute."""
    outlet = Outlet(bus, topic, "d", f"publish-{os.urandom(4).hex()}")
    await outlet.open()
    assert outlet._producer is not None
    sent_all = asyncio.Event()

    async def commit(sent: Iterable[asyncio.Future[object]]) -> None:
        await asyncio.gather(*sent)
        sent_all.set()
        await asyncio.Event().wait()

    outlet._producer.commit = commit  # type: ignore[method-assign]
    recorder = Recorder(dataset="d", producer="p", format="auto", max_message_bytes=1 << 20)
    writing = asyncio.create_task(outlet.write(Batch(records=[recorder.prepare(GOOD, orjson.loads(GOOD))])))
    await sent_all.wait()
    partitions = await bus.partitions(topic)
    sent = await bus.end_offsets(partitions, isolation="read_uncommitted")
    assert await bus.end_offsets(partitions) != sent
    writing.cancel()
    await asyncio.wait({writing})
    async with asyncio.timeout(5):  # the broker writes its markers after it has answered
        while any(end < sent[p] for p, end in (await bus.end_offsets(partitions)).items()):
            await asyncio.sleep(0.05)
