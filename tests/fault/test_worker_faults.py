"""`megaflow process` as its user meets it: told to stop, without a broker, with a broken definition, behind retention.

The broker is the tests' own: it is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition as KafkaPartition

from megaflow_stream.bus import Bus, TopicDescription, TopicPartition, connect
from megaflow_stream.observe.status import read_status
from megaflow_stream.project.scaffold import init
from megaflow_stream.runtime import services
from tests.engine_cases.case import Case, everything

pytestmark = [pytest.mark.xdist_group("own-broker"), pytest.mark.timeout(300)]

DECLARED = Path(__file__).parents[1] / "engine_cases" / "declared.py"
STOP_SECONDS = 15.0  # what a worker may take to end, imports that are under way included
BACK_SECONDS = 30.0  # what an idle worker may take after its broker is up again
LOG_LINES = 300


@dataclass
class Broker:
    """A broker that may be killed."""

    folder: Path
    address: str = ""

    def up(self) -> None:
        options = {"kafka": True, "s3": False, "authenticate": False}
        self.address = asyncio.run(services.up(self.folder, **options)).bootstrap_servers

    async def kill(self) -> None:
        (kafka,) = [s for s in await services.status(self.folder) if s.name == "kafka"]
        assert kafka.pid is not None
        os.kill(kafka.pid, signal.SIGKILL)
        while not services.dead(self.folder):
            await asyncio.sleep(0.02)

    async def restart(self) -> None:
        assert await services.restart_dead(self.folder) == ["kafka"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = Broker(tmp_path_factory.mktemp("broker"))
    broker.up()
    yield broker
    asyncio.run(services.down(broker.folder))


@pytest.fixture
async def broker(running: Broker) -> Broker:
    if services.dead(running.folder):  # a test that failed left it so
        await running.restart()
    return running


@pytest.fixture
async def bus(broker: Broker) -> AsyncIterator[Bus]:
    bus = await connect(broker.address)
    for topic in ("status", "status.events"):
        await bus.create_topic(TopicDescription(topic, 1))
    yield bus
    await bus.close()


@dataclass
class Workers:
    """Workers of a project with the engine cases' processors, each a process of its own."""

    folder: Path
    broker: Broker
    case: Case
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def group(self) -> str:
        return f"megaflow.process.{self.case.prefix}-plain"

    @property
    def root(self) -> Path:
        return self.folder / "project"

    def create(self) -> None:
        init(self.root)
        (self.root / "processors" / "declared.py").write_text(DECLARED.read_text())

    def start(self, *, slow_us: int = 0) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "megaflow_stream.cli.main", "process", f"{self.case.prefix}-plain"]
                + ["--component", "worker/it", "--project", str(self.root)]
                + ["--bootstrap-servers", self.broker.address],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "ENGINE_CASE_PREFIX": self.case.prefix,
                    "ENGINE_CASE_SLOW_US": str(slow_us),
                    "ENGINE_CASE_HANG_SECONDS": "60",
                },
            )
        self.started.append(worker)
        return worker

    @property
    def log(self) -> Path:
        return self.folder / "worker.log"

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    async def ends(self, worker: subprocess.Popen[bytes], seconds: float = STOP_SECONDS) -> int:
        return await asyncio.to_thread(worker.wait, seconds)

    async def stop(self, worker: subprocess.Popen[bytes]) -> int:
        worker.terminate()
        return await self.ends(worker)

    async def done(self, bus: Bus, limit_seconds: float = 120) -> None:
        async with asyncio.timeout(limit_seconds):
            while not await self.case.done(bus, self.group):
                for worker in self.started:
                    assert worker.returncode is not None or worker.poll() is None, self.lines()[-20:]
                await asyncio.sleep(0.1)

    async def shown(self, bus: Bus, name: str, least: float) -> None:
        """Waits until the worker that was started last says so in its status."""
        async with asyncio.timeout(60):
            while True:
                found = (await read_status(bus)).get("worker/it", {})
                if found.get("pid") == self.started[-1].pid and found.get(name, 0) >= least:
                    return
                await asyncio.sleep(0.1)


@pytest.fixture
async def workers(broker: Broker, bus: Bus, tmp_path: Path) -> AsyncIterator[Workers]:
    made = Workers(tmp_path, broker, Case(f"worker.{uuid.uuid4().hex[:8]}", partitions=4))
    made.create()
    await made.case.create(bus)
    yield made
    for worker in made.started:
        if worker.poll() is None:
            worker.kill()
            worker.wait()


async def test_sigterm_ends_a_worker_while_idle_and_while_full(workers: Workers, bus: Bus) -> None:
    await workers.case.load(bus, 1200, special={50: "RAISE"}, seed=1)
    idle = workers.start()
    await workers.done(bus)  # a poison record has not ended it
    assert await workers.stop(idle) == 0
    await workers.case.load(bus, 6000, seed=2)
    full = workers.start(slow_us=3000)
    await workers.shown(bus, "bytes_in_flight", 400_000)  # at least two partitions are over their mark
    assert await workers.stop(full) == 0
    workers.start()
    await workers.done(bus)
    assert await workers.case.problems(bus, dedup=False) == []


async def test_an_idle_worker_is_back_after_its_broker_and_ends_without_one(workers: Workers, bus: Bus) -> None:
    await workers.case.load(bus, 500, seed=1)
    worker = workers.start()
    await workers.done(bus)
    await workers.broker.kill()
    await workers.broker.restart()
    up = time.monotonic()
    again = await connect(workers.broker.address)
    try:
        await workers.case.load(again, 500, seed=2)
        await workers.done(again, BACK_SECONDS - (time.monotonic() - up))
        assert await workers.case.problems(again, dedup=False) == []
        await workers.broker.kill()
        assert await workers.stop(worker) == 0, workers.lines()[-20:]
        assert len(workers.lines()) < LOG_LINES
        nobody = workers.start()
        assert await workers.ends(nobody, 60) == 3
        assert "error: " in workers.lines()[-1]
        await workers.broker.restart()
    finally:
        await again.close()


async def test_a_broker_that_dies_in_the_middle_loses_and_doubles_nothing(workers: Workers, bus: Bus) -> None:
    await workers.case.load(bus, 8000, seed=1)
    worker = workers.start(slow_us=1500)
    await workers.shown(bus, "records", 1000)
    await workers.broker.kill()
    await workers.broker.restart()
    again = await connect(workers.broker.address)
    try:
        await workers.shown(again, "records", 3000)
        await workers.broker.kill()
        assert await workers.stop(worker) == 0, workers.lines()[-20:]  # in the middle of its transactions
        assert len(workers.lines()) < LOG_LINES, workers.lines()[:50]
        await workers.broker.restart()
        last = workers.start()
        await workers.done(again)
        assert await workers.stop(last) == 0
        assert await workers.case.problems(again, dedup=False) == []
    finally:
        await again.close()


async def test_a_position_that_retention_has_overtaken_ends_the_worker_with_both_offsets(
    workers: Workers, bus: Bus
) -> None:
    await workers.case.load(bus, 400)
    source = TopicPartition(f"{workers.case.prefix}.in", 2)
    first, later = (workers.case.made[2][n][0] for n in (5, 40))
    producer = await bus.producer(f"position-{workers.case.prefix}")
    await producer.begin()
    await producer.send_offsets(workers.group, {source: first})
    await producer.commit([])
    await producer.close()
    admin = AIOKafkaAdminClient(bootstrap_servers=workers.broker.address)
    await admin.start()
    await admin.delete_records({KafkaPartition(*source): RecordsToDelete(before_offset=later)})
    await admin.close()
    worker = workers.start()
    assert await workers.ends(worker, 60) == 1
    last = workers.lines()[-1]
    assert last.startswith("error: ")
    assert f"the committed offset {first} of {workers.group} is older than the first retained, {later}" in last
    assert f"topic {source.topic}, partition 2" in last


async def test_a_missing_topic_is_the_last_line(workers: Workers, bus: Bus) -> None:
    await bus.delete_topic(f"{workers.case.prefix}.dlq")
    assert await workers.ends(workers.start(), 60) == 1
    assert workers.lines()[-1].startswith(f"error: processor {workers.case.prefix}-plain needs the topic")


@pytest.mark.parametrize("dies", [False, True])
async def test_a_handler_that_cannot_be_built_dead_letters_nothing(workers: Workers, bus: Bus, dies: bool) -> None:
    """In the compute process alone: the worker itself only reads the declaration."""
    what = "os._exit(7)" if dies else 'raise LookupError("there is no lexicon")'
    path = workers.root / "processors" / "declared.py"
    path.write_text(path.read_text().replace("        return self.handle\n", f"        {what}\n"))
    await workers.case.load(bus, 300)
    assert await workers.ends(workers.start(), 120) == (1 if dies else 2)
    cause = "exit status 7" if dies else "cannot be built: LookupError: there is no lexicon"
    assert cause in workers.lines()[-1]
    assert await bus.committed(workers.group) == {}
    assert not any((await everything(bus, f"{workers.case.prefix}.dlq")).values())
