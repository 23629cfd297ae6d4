"""Workers killed and frozen at exact places: each input is in the output once, in order, whatever the seed.

The second half runs without de-duplication, whose state would hide a record that came twice.
"""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from pathlib import Path

import pytest

from megaflow_stream.bus import Bus
from tests.engine_cases.case import Case
from tests.engine_cases.fleet import Fleet

DECLARED = Path(__file__).parent.parent / "engine_cases" / "declared.py"
FAULTS = 6


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "seed"), [("dedup", 1), ("plain", 3)])
async def test_each_input_once_through_kills_and_freezes(
    kafka: str, bus: Bus, tmp_path: Path, name: str, seed: int
) -> None:
    prefix = f"kills.{uuid.uuid4().hex[:8]}"
    case = Case(prefix, partitions=4)
    fleet = Fleet(kafka, DECLARED, name, prefix, tmp_path, seed, faults=FAULTS)
    await case.create(bus)
    await case.load(bus, 3000, seed=seed)
    group, loads, deadline = f"megaflow.process.{prefix}-{name}", 1, time.monotonic() + 300
    try:
        # More input comes until every fault has found its place: some need several commits of one partition.
        while fleet.struck < FAULTS or not await case.done(bus, group):
            assert time.monotonic() < deadline, f"{fleet.struck} of {FAULTS} faults struck, workers born {fleet.born}"
            fleet.tend()
            if await case.done(bus, group):
                fleet.thaw()
                await case.load(bus, 600, seed=seed + 1000 * loads)
                loads += 1
            await asyncio.sleep(0.1)
        fleet.thaw()
        while not await case.done(bus, group):  # what the zombies woke up to
            fleet.tend()
            await asyncio.sleep(0.1)
    finally:
        statuses = fleet.end()
    assert await case.problems(bus, dedup=name == "dedup") == []
    assert set(statuses) <= {0, -signal.SIGTERM}  # the latter: still in its imports
