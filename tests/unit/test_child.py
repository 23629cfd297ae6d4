"""When a process of a run is started again, and when it ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from megaflow_stream.errors import MegaflowError
from megaflow_stream.runtime import child as children
from megaflow_stream.runtime.child import Child, CrashLoop
from megaflow_stream.runtime.lifeline import Lifeline
from megaflow_stream.runtime.supervisor import Supervisor


async def lives(monkeypatch: pytest.MonkeyPatch, path: Path, statuses: Sequence[int], done: bool = False) -> Child:
    """A child whose process ends at once with each of the statuses, and then is told to stop.

    done: nothing is left for it to do."""
    left = list(statuses)

    async def once(self: Child) -> int:
        if not left:
            self.stopping = True
            return 0
        return left.pop(0)

    async def sleep(seconds: float) -> None:
        """Backs off in no time."""

    monkeypatch.setattr(Child, "_once", once)
    monkeypatch.setattr(children.asyncio, "sleep", sleep)

    async def finished() -> bool:
        return done

    with Lifeline() as lifeline:
        child = Child(name="worker/it", arguments=[], log_path=path / "log", lifeline=lifeline, finished=finished)
        await child.run()
    return child


@pytest.mark.parametrize(
    "statuses", [[-9] * 19, [-15] * 30, [3] * 20, [1, 1, 1, 1, -9, 1, 1, 1, 1], [1, 3, 1, 3, 1, 3, 1, 3]]
)
async def test_it_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: list[int]) -> None:
    """Being told to end, or killed now and then, is no fault of the component's, nor is a service that is away."""
    assert (await lives(monkeypatch, tmp_path, statuses)).restarts == len(statuses)


@pytest.mark.parametrize(
    "statuses", [[1] * 5, [-11] * 5, [-9] * 20, [0, 70, 1, 1, 1], [1, 3, 1, 3, 1, 3, 1, 3, 1], [2], [-9, 2]]
)
async def test_a_crash_loop_ends_the_run_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: list[int]
) -> None:
    (tmp_path / "log").write_text("first\nerror: there is no lexicon\n")
    with pytest.raises(CrashLoop) as caught:
        await lives(monkeypatch, tmp_path, statuses)
    assert caught.value.exit_code == 1
    assert str(caught.value).splitlines()[-1].startswith("error: there is no lexicon")


async def test_one_that_has_finished_its_work_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = await lives(monkeypatch, tmp_path, [1, 0, 1], done=True)
    assert (child.restarts, child.stopping) == (1, False)


async def test_a_supervisor_notices_what_fails_before_its_children_are_started() -> None:
    async def restart() -> list[str]:
        raise MegaflowError("the data are gone")

    supervisor = Supervisor([], restart, lambda name: None)
    supervisor.watch_services()
    with pytest.raises(MegaflowError, match="the data are gone"):
        async with asyncio.timeout(20):
            await supervisor.failed()
    await supervisor.stop()
