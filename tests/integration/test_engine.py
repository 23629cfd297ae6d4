"""The engine on a real broker: every record accounted for, bad ones found, bounded ends."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
import uuid
from pathlib import Path

import pytest

from megaflow_stream.bus import Bus
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.errors import NotFound
from megaflow_stream.observe.dead_letters import show_letter
from megaflow_stream.processing.engine import Engine
from megaflow_stream.processing.member import Options
from tests.engine_cases.case import Case

DECLARED = Path(__file__).parent.parent / "engine_cases" / "declared.py"


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    prefix = f"engine.{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("ENGINE_CASE_PREFIX", prefix)
    return Case(prefix, partitions=2)


def declared(case: Case, name: str, folder: Path) -> tuple[Path, Processor]:
    """The test's own copy of the declarations, since a path is loaded once a process."""
    path = folder / f"declared_{case.prefix.replace('.', '_')}.py"
    path.write_text(DECLARED.read_text())
    (found,) = [p for p in definitions(path, Processor) if p.name.endswith(name)]
    return path, found


async def run_until_done(bus: Bus, case: Case, works: list[tuple[Path, Processor]], limit: float = 60) -> Engine:
    engine, stop = Engine(bus, works, options=Options(session_seconds=6, heartbeat_seconds=0.5)), asyncio.Event()
    task = asyncio.create_task(engine.run(stop))
    deadline = time.monotonic() + limit
    while not await case.done(bus, works[0][1].group):
        assert time.monotonic() < deadline, "the group did not reach the end"
        if task.done():
            task.result()
        await asyncio.sleep(0.05)
    stop.set()
    await asyncio.wait_for(task, 15)
    return engine


@pytest.mark.parametrize("name", ["plain", "dedup"])
async def test_each_input_once_and_in_order(bus: Bus, case: Case, tmp_path: Path, name: str) -> None:
    await case.create(bus)
    await case.load(bus, 4000, special={7: "DROP", 1003: "REJECT"})
    await run_until_done(bus, case, [declared(case, name, tmp_path)])
    assert await case.problems(bus, dedup=name == "dedup") == []


async def test_state_survives_a_restart(bus: Bus, case: Case, tmp_path: Path) -> None:
    await case.create(bus)
    work = declared(case, "dedup", tmp_path)
    for seed in (1, 2, 3):
        await case.load(bus, 700, seed=seed, repeats=0.2)
        await run_until_done(bus, case, [work])
    assert await case.problems(bus, dedup=True) == []


@pytest.mark.timeout(300)
async def test_bad_records_and_only_those_are_dead_letters(bus: Bus, case: Case, tmp_path: Path) -> None:
    await case.create(bus)
    await case.load(bus, 600, special={50: "HANG", 51: "RAISE", 301: "DIE", 304: "RAISE"})
    await run_until_done(bus, case, [declared(case, "plain", tmp_path)], limit=240)
    assert await case.problems(bus, dedup=False) == []


async def test_a_missing_topic_is_named(bus: Bus, case: Case, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=case.prefix):
        await Engine(bus, [declared(case, "plain", tmp_path)]).run(asyncio.Event())


async def test_an_idle_worker_ends_at_once(bus: Bus, case: Case, tmp_path: Path) -> None:
    await case.create(bus)
    await run_until_done(bus, case, [declared(case, "plain", tmp_path)])


def test_declarations_are_not_on_the_path() -> None:
    assert importlib.util.find_spec("declared") is None
    assert "ENGINE_CASE_PREFIX" not in os.environ


@pytest.mark.parametrize("name", ["plain", "dedup"])
async def test_a_dead_letter_larger_than_its_topic_takes_is_cut(
    bus: Bus, case: Case, tmp_path: Path, name: str
) -> None:
    await case.create(bus)
    await bus.alter_topic(f"{case.prefix}.dlq", {"max.message.bytes": "200000"})
    await case.load(bus, 50)
    producer = await bus.producer()
    value = b'{"n": 99, "body": "RAISE%s"}' % (b"x" * 400_000)
    await (await producer.send(f"{case.prefix}.in", value, partition=0, key=b"big"))
    await producer.close()
    await run_until_done(bus, case, [declared(case, name, tmp_path)])
    letter = await show_letter(bus, 0, 0, topic=f"{case.prefix}.dlq")
    assert letter["headers"]["value-bytes"] == str(len(value))
    assert 190_000 < len(letter["value"]) < 200_000
