"""The engine on both buses, with its handlers in this process: each input has one effect, whoever owns it when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megaflow_stream.bus import Bus, OutRecord, Producer, TopicPartition
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.errors import Fenced
from megaflow_stream.processing.engine import Engine
from megaflow_stream.processing.member import Options
from megaflow_stream.processing.partition import OffsetsLost
from megaflow_stream.testing import LocalCompute
from tests.contract.place import Place
from tests.engine_cases.case import Case

DECLARED = Path(__file__).parents[1] / "engine_cases" / "declared.py"
OPTIONS = Options(session_seconds=6.0, heartbeat_seconds=0.2, idle_commit_seconds=0.05)


@dataclass
class Trial:
    """A case's topics and processors on one of the buses."""

    place: Place
    case: Case
    processors: list[Processor]
    engines: list[tuple[asyncio.Task[None], asyncio.Event]] = field(default_factory=list)

    def processor(self, name: str) -> Processor:
        (found,) = [processor for processor in self.processors if processor.name.endswith(name)]
        return found

    @property
    def partitions(self) -> dict[str, int]:
        return {f"{self.case.prefix}.out": self.case.partitions}

    async def start(self, name: str, bus: Bus | None = None) -> Engine:
        """One more worker."""
        processor, bus = self.processor(name), bus or await self.place.client()
        engine = Engine(
            bus, [(DECLARED, processor)], options=OPTIONS, compute=LocalCompute([processor], self.partitions)
        )
        stop = asyncio.Event()
        self.engines.append((asyncio.create_task(engine.run(stop)), stop))
        return engine

    async def done(self, name: str) -> None:
        async with asyncio.timeout(60):
            while not await self.case.done(self.place.bus, self.processor(name).group):
                for task, _ in self.engines:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for _, stop in self.engines:
            stop.set()
        async with asyncio.timeout(20):
            await asyncio.gather(*(task for task, _ in self.engines))
        self.engines.clear()

    async def run(self, name: str) -> None:
        await self.start(name)
        await self.done(name)
        await self.stop()


@pytest.fixture
async def trial(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    case = Case(place.name("engine"), partitions=2)
    monkeypatch.setenv("ENGINE_CASE_PREFIX", case.prefix)
    path = tmp_path / f"declared_{case.prefix.replace('.', '_')}.py"
    path.write_text(DECLARED.read_text())
    await case.create(place.bus)
    place.topics += [f"{case.prefix}.{name}" for name in ("in", "out", "dlq", "dropped", "state", "statistics")]
    return Trial(place, case, definitions(path, Processor))


@pytest.mark.parametrize("name", ["plain", "dedup"])
async def test_each_input_once_in_order(trial: Trial, name: str) -> None:
    await trial.case.load(trial.place.bus, 1500, special={7: "DROP", 803: "REJECT", 900: "RAISE"}, repeats=0.1)
    await trial.run(name)
    assert await trial.case.problems(trial.place.bus, dedup=name == "dedup") == []


async def test_state_is_restored(trial: Trial) -> None:
    for seed in (1, 2):
        await trial.case.load(trial.place.bus, 300, seed=seed, repeats=0.3)
        await trial.run("dedup")
    assert await trial.case.problems(trial.place.bus, dedup=True) == []


async def test_a_state_without_offsets_is_refused(trial: Trial) -> None:
    await trial.case.load(trial.place.bus, 100)
    await trial.run("dedup")
    # Another group, the same state.
    forgotten = replace(trial.processor("dedup"), name=f"{trial.case.prefix}-forgotten")
    engine = Engine(
        trial.place.bus, [(DECLARED, forgotten)], options=OPTIONS, compute=LocalCompute([forgotten], trial.partitions)
    )
    with pytest.raises(OffsetsLost, match=f"{forgotten.group} has no committed offset"):
        async with asyncio.timeout(30):
            await engine.run(asyncio.Event())
    assert await trial.case.problems(trial.place.bus, dedup=True) == []


async def test_workers_come_and_go(trial: Trial) -> None:
    await trial.case.load(trial.place.bus, 1000, seed=1)
    first = await trial.start("plain")
    second = await trial.start("plain")
    async with asyncio.timeout(30):
        while not (first.members and second.members and first.members[0].parts and second.members[0].parts):
            await asyncio.sleep(0.01)
    await trial.case.load(trial.place.bus, 1000, seed=2)
    _, stop = trial.engines[0]
    stop.set()
    await trial.case.load(trial.place.bus, 1000, seed=3)
    await trial.done("plain")
    await trial.stop()
    assert await trial.case.problems(trial.place.bus, dedup=False) == []


class Racing:
    """A bus whose next producer of one id is preceded, accompanied or followed by an older owner's commit."""

    def __init__(self, bus: Bus, transactional_id: str, when: str, commit: Callable[[], Awaitable[str]]) -> None:
        self.bus, self.transactional_id, self.when, self.commit = bus, transactional_id, when, commit
        self.outcome = "nothing"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bus, name)

    async def producer(self, transactional_id: str | None = None, **options: Any) -> Producer:
        if transactional_id != self.transactional_id or self.outcome != "nothing":
            return await self.bus.producer(transactional_id, **options)
        self.outcome = "racing"
        if self.when == "before":
            self.outcome = await self.commit()
        racing = asyncio.create_task(self.commit()) if self.when == "during" else None
        producer = await self.bus.producer(transactional_id, **options)
        if racing is not None:
            self.outcome = await racing
        if self.when == "after":
            self.outcome = await self.commit()
        return producer


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_an_older_owner_commits_while_a_newer_one_takes_over(trial: Trial, when: str) -> None:
    """State is off: it would hide records that come twice.

    before: the commit ends before InitProducerId, after the group has handed the partition over. after: between
    InitProducerId and the question for the committed offset."""
    place, case = trial.place, trial.case
    processor, source = trial.processor("plain"), TopicPartition(f"{case.prefix}.in", 0)
    await case.load(place.bus, 200, repeats=0.0)
    rows = case.made[0][:10]
    old = await place.producer(f"{processor.group}.{source.topic}.0")
    await old.begin()
    made = [OutRecord(b'{"offset":%d,"n":%d}' % (offset, n)) for offset, n, _ in rows]
    sent = await old.send_many(f"{case.prefix}.out", 0, made)
    await old.send_offsets(processor.group, {source: rows[-1][0] + 1})
    await asyncio.gather(*sent)

    async def commit() -> str:
        try:
            await old.commit(sent)
        except Fenced:
            return "fenced"
        return "committed"

    racing = Racing(place.bus, f"{processor.group}.{source.topic}.0", when, commit)
    await trial.start("plain", racing)  # type: ignore[arg-type]
    await trial.done("plain")
    await trial.stop()
    assert racing.outcome in {"before": ["committed"], "during": ["committed", "fenced"], "after": ["fenced"]}[when]
    assert await case.problems(place.bus, dedup=False) == []


async def test_a_zombie_writes_nothing_that_is_seen(trial: Trial) -> None:
    """Another owner takes the id while a worker is at it: the worker throws all away, and takes it back in order."""
    place, case = trial.place, trial.case
    await case.load(place.bus, 600, seed=1)
    await trial.start("plain")
    await trial.done("plain")
    for seed in (2, 3):
        thief = await place.bus.producer(f"{trial.processor('plain').group}.{case.prefix}.in.0")
        await thief.close()
        await case.load(place.bus, 300, seed=seed)
        await trial.done("plain")
    await trial.stop()
    assert await case.problems(place.bus, dedup=False) == []
