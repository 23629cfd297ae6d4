"""kill -9 of the command that started the services: the next command adopts or ends what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_stream.project.folder import Project, find
from megaflow_stream.runtime import services
from megaflow_stream.runtime.connection import located
from megaflow_stream.runtime.services import process
from megaflow_stream.runtime.services.kafka import Kafka
from megaflow_stream.runtime.services.seaweedfs import SeaweedFS

pytestmark = pytest.mark.xdist_group("embedded services")

COMMAND = """
import asyncio, sys
from pathlib import Path
from megaflow_stream.project.folder import find
from megaflow_stream.runtime.connection import located

async def main():
    project = find(Path(sys.argv[1]))
    async with located(project, project.settings, kafka=False) as found:
        print("up", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    (tmp_path / "pipeline.yaml").write_text("pipeline: []\n")
    found = find(tmp_path)
    yield found
    asyncio.run(services.down(found.state_dir))


def _processes(project: Project) -> list[int]:
    state_dir = project.state_dir.resolve()
    return [pid for service in (Kafka(), SeaweedFS()) for pid in process.find(service.marker(state_dir))]


async def _gone(pid: int) -> None:
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.01)


def _start(project: Project) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(project.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_what_a_killed_command_left_is_adopted_and_stopped_by_the_next(project: Project) -> None:
    with _start(project) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "up\n"
        command.send_signal(signal.SIGKILL)
    left = _processes(project)
    assert len(left) == 1

    async def next_command() -> None:
        async with located(project, project.settings, kafka=False) as found:
            assert list(found.pids.values()) == left

    asyncio.run(next_command())
    assert _processes(project) == []


def test_a_start_killed_halfway_is_taken_up_by_the_next(project: Project) -> None:
    with _start(project) as command:
        while not (started := _processes(project)):
            assert command.poll() is None
        command.send_signal(signal.SIGKILL)
    assert len(started) == 1
    found = asyncio.run(services.up(project.state_dir, kafka=False))
    assert _processes(project) == list(found.pids.values())


def test_ctrl_c_leaves_no_orphan(project: Project) -> None:
    for wait_until_up in (True, False):
        with _start(project) as command:
            assert command.stdout is not None
            if wait_until_up:
                assert command.stdout.readline() == "up\n"
            else:
                while not _processes(project):
                    assert command.poll() is None
            command.send_signal(signal.SIGINT)
        assert _processes(project) == []


def test_a_service_that_hangs_is_started_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaflow_stream.runtime.services.starting.ADOPT_SECONDS", 0.5)
    monkeypatch.setattr("megaflow_stream.runtime.services.starting.CHECK_SECONDS", 0.5)
    before = asyncio.run(services.up(project.state_dir, kafka=False))
    os.kill(before.pids["s3"], signal.SIGSTOP)
    after = asyncio.run(services.up(project.state_dir, kafka=False))
    assert after.pids != before.pids
    assert after.endpoint_url == before.endpoint_url
    asyncio.run(_gone(before.pids["s3"]))
    assert _processes(project) == list(after.pids.values())
