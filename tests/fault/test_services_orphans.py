"""The command that started the services is killed: the next one adopts or ends what is left. One that is told to end
leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megaflow_stream import bus
from megaflow_stream.bus import TopicDescription
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


def _megaflow(project: Project, *arguments: str, before: str = "") -> subprocess.Popen[str]:
    """The command itself, and no shell around it."""
    command = [sys.executable, "-m", "megaflow_stream.cli.main", *arguments, "--project", str(project.root)]
    return subprocess.Popen(
        ["sh", "-c", f'{before} exec "$@"', "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def _with_a_record(project: Project) -> None:
    """Kafka runs, with a record on the topic `seen`, and the next command is its only user."""
    found = await services.up(project.state_dir, s3=False, keep=False)
    opened = await bus.connect(found.bootstrap_servers, security=found.security)
    await opened.create_topic(TopicDescription("seen", 1))
    producer = await opened.producer()
    await (await producer.send("seen", b"{}", partition=0))
    await producer.close()
    await opened.close()


# The last one as a shell's background job has it: Ctrl-C is not for it.
SIGNALS = [(signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGTERM, "trap '' INT;")]


@pytest.mark.parametrize(("number", "before"), SIGNALS)
def test_a_command_that_is_told_to_end_leaves_no_orphan(project: Project, number: signal.Signals, before: str) -> None:
    asyncio.run(_with_a_record(project))
    with _megaflow(project, "status", "tail", "seen", before=before) as command:
        assert command.stdout is not None
        assert '"topic":"seen"' in command.stdout.readline()
        command.send_signal(number)
        _, errors = command.communicate()
    assert (command.returncode, errors.splitlines()[-1]) == (130, "interrupted")
    assert _processes(project) == []


@pytest.mark.parametrize(("number", "before"), SIGNALS)
def test_one_that_is_told_so_half_way_leaves_no_orphan(project: Project, number: signal.Signals, before: str) -> None:
    with _megaflow(project, "services", "up", "--bootstrap-servers=127.0.0.1:9", before=before) as command:
        while not _processes(project):
            assert command.poll() is None
        command.send_signal(number)
        command.communicate()
    assert command.returncode == 130
    assert _processes(project) == []


def _drip(server: socket.socket, asked: threading.Event, over: threading.Event) -> None:
    """Answers every request with a file that never ends: no timeout of a client would end it either."""
    open_: list[socket.socket] = []
    while not over.wait(0.1):
        with suppress(TimeoutError):
            connection = server.accept()[0]
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
            open_.append(connection)
            asked.set()
        for connection in open_:
            with suppress(OSError):  # the client is gone
                connection.sendall(b".")
    for connection in open_:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.timeout(120)
def test_a_download_that_never_ends_holds_back_nobody(
    project: Project, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    asked, over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        dripping = threading.Thread(target=_drip, args=(server, asked, over))
        dripping.start()
        monkeypatch.setenv("MEGAFLOW_MAVEN_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MEGAFLOW_CACHE_DIR", str(project.root / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with _megaflow(project, "services", "up") as command:
            asked.wait()
            command.send_signal(number)
            command.communicate()
        over.set()
        dripping.join()
    assert command.returncode == 130
    assert _processes(project) == []
    assert [path.name for path in (project.root / "cache" / "jars").iterdir()] == [".lock"]


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
