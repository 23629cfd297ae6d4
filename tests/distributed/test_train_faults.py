"""Ranks as processes under the launcher, with faults at exact places: whatever dies, the same bits, everything once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaflow_stream.observe.status import read_status
from megaflow_stream.training.job import Job
from megaflow_stream.training.launcher import Launcher, TrainingFailed
from tests.training_job import ThreadGroup, TrainingJob, final, trained

Events = list[Mapping[str, Any]]


@pytest.fixture
def job(kafka: str, s3: Any, tmp_path: Path) -> TrainingJob:
    found = TrainingJob(kafka, s3, tmp_path, rank_timeout_seconds=8.0)
    asyncio.run(found.topics())
    return found


async def launch(
    job: TrainingJob,
    ranks: int,
    *,
    stop_at: str = "drained",
    on_event: Callable[[Launcher, Mapping[str, Any]], None] = lambda launcher, event: None,
    told: Job | None = None,
) -> tuple[Launcher, Events]:
    """Runs until the event `stop_at`, then stops cleanly."""
    events: Events = []

    def take(event: Mapping[str, Any]) -> None:
        events.append(event)
        on_event(launcher, event)
        if event["event"] == stop_at:
            launcher.stop()

    launcher = Launcher(told or job.job, job.job.trainer(), ranks, on_event=take)
    await launcher.run()
    return launcher, events


def check(job: TrainingJob, events: Events) -> None:
    """Every conversation is trained once, and the weights are those of an undisturbed replay of the same plan."""
    rows = asyncio.run(trained(job))
    assert sorted(c for _, _, c, _ in rows) == sorted(f"conversation-{n}" for n in range(2 * job.written))
    replay = ThreadGroup(job.with_(replay=True), 1)
    assert final(replay.join())["weights_sha256"] == final(events)["weights_sha256"]
    assert asyncio.run(trained(job, f"{job.name}.replay")) == rows


@pytest.mark.parametrize(
    "fault",
    [
        {"point": "rank.before_reduce", "rank": 0, "step": 7},
        {"point": "rank.after_apply", "rank": 1, "step": 7},
        {"point": "rank.after_plan", "rank": 0, "step": 1},
        {"point": "rank.before_save", "rank": 0, "step": 5},
        {"point": "rank.after_save", "rank": 0, "step": 5},
        {"point": "rank.before_slices", "rank": 1, "step": 6, "action": "stop"},
    ],
    ids=lambda fault: f"{fault['point']}-{fault['rank']}",
)
def test_a_lost_rank_changes_nothing(job: TrainingJob, fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFLOW_FAULTS", json.dumps([{**fault, "generation": 1}]))
    asyncio.run(job.write(80))
    asyncio.run(job.drain())
    launcher, events = asyncio.run(launch(job, 2))
    assert launcher.restarts == 1
    cause = next(e["cause"] for e in events if e["event"] == "restart")
    assert f"rank {fault['rank']}" in cause
    assert ("gave no sign of life" if "action" in fault else "SIGKILL") in cause
    check(job, events)


def test_a_killed_job_goes_on_with_another_number_of_ranks(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(job.write(80))
    asyncio.run(job.drain())
    asyncio.run(launch(job, 2, stop_at="", told=job.with_(until_step=6)))
    _, events = asyncio.run(launch(job, 3))
    assert next(e["step"] for e in events if e["event"] == "step") == 7
    check(job, events)


def test_a_crash_loop_ends_with_its_cause(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = {"point": "rank.before_slices", "step": 1, "action": "raise"}
    monkeypatch.setenv("MEGAFLOW_FAULTS", json.dumps([fault]))
    asyncio.run(job.write(8))
    with pytest.raises(TrainingFailed, match=r"5 starts came no further than step 0.*rank.before_slices") as error:
        asyncio.run(launch(job, 1))
    assert error.value.exit_code == 1


def test_a_wrong_tokenizer_ends_the_job_at_once_with_exit_code_2(job: TrainingJob) -> None:
    asyncio.run(job.write(4, tokenizer="f" * 64))
    with pytest.raises(TrainingFailed, match="ffffffffffff") as error:
        asyncio.run(launch(job, 1))
    assert error.value.exit_code == 2
    assert "process the conversations again" in error.value.hint


def test_ranks_end_when_their_launcher_is_gone(job: TrainingJob) -> None:
    asyncio.run(job.write(8))
    found: list[psutil.Process] = []

    async def lose() -> None:
        def take(event: Mapping[str, Any]) -> None:
            if event["event"] == "step":
                found.extend(psutil.Process(r.process.pid) for r in launcher._ranks)
                for r in launcher._ranks:  # what the kernel does with the pipes of a launcher that was killed
                    assert r.process.stdin is not None
                    r.process.stdin.close()

        launcher = Launcher(job.job, job.job.trainer(), 2, on_event=take)
        running = asyncio.create_task(launcher.run())
        while not found:
            await asyncio.sleep(0.05)
        _, alive = await asyncio.to_thread(psutil.wait_procs, found, 10)
        assert alive == []
        launcher.kill()
        with pytest.raises(TrainingFailed):
            await running

    asyncio.run(lose())


def test_a_stop_before_the_ranks_listen_ends_well(job: TrainingJob) -> None:
    async def run() -> None:
        launcher = Launcher(job.job, job.job.trainer(), 2)
        running = asyncio.create_task(launcher.run())
        while len(launcher._ranks) < 2:
            await asyncio.sleep(0)
        launcher.stop()  # the interpreters have only just been started
        await running
        bus = await job.bus()
        status = await read_status(bus)
        await bus.close()
        assert status[f"trainer/{job.name}"]["state"] == "stopped"

    asyncio.run(run())


def test_a_definition_may_print(job: TrainingJob) -> None:
    """stdout carries events, and whatever a library or a person debugging prints, JSON or not."""
    job.definition.write_text(job.definition.read_text() + "\nprint(7)\nprint('loss {')\n")
    asyncio.run(job.write(8))
    asyncio.run(job.drain())
    _, events = asyncio.run(launch(job, 1))
    assert final(events)["step"] == 1


def test_sigterm_to_one_rank_stops_all_of_them_with_a_checkpoint(job: TrainingJob) -> None:
    asyncio.run(job.write(40))

    def hit(launcher: Launcher, event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 3:
            os.kill(launcher._ranks[1].process.pid, signal.SIGTERM)

    _, events = asyncio.run(launch(job, 2, stop_at="", on_event=hit))
    end = final(events)
    assert end["step"] >= 3
    rows = asyncio.run(trained(job))
    assert max(step for *_, step in rows) == end["step"]


def test_a_last_checkpoint_that_takes_too_long_is_trained_again(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store does not take it in time: the launcher ends by its bound and says what was lost, which is time."""
    fault = {"point": "rank.before_save", "step": 5, "action": "stop"}
    monkeypatch.setenv("MEGAFLOW_FAULTS", json.dumps([fault]))
    asyncio.run(job.write(80))
    asyncio.run(job.drain())

    async def stop() -> None:
        def take(event: Mapping[str, Any]) -> None:
            if event["event"] == "step" and event["step"] == 5:
                launcher.stop()

        launcher = Launcher(job.job, replace(job.job.trainer(), stop_seconds=1.0), 1, on_event=take)
        await launcher.run()

    with pytest.raises(TrainingFailed, match="did not end within 1 s") as error:
        asyncio.run(stop())
    assert "stop_seconds" in error.value.hint
    monkeypatch.delenv("MEGAFLOW_FAULTS")
    _, events = asyncio.run(launch(job, 1))
    assert next(e["step"] for e in events if e["event"] == "step") == 1
    check(job, events)
