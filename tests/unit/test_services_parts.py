"""Ports, credentials, state, processes: the parts of the embedded services that need no service."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from megaflow_stream.errors import MegaflowError
from megaflow_stream.runtime import services
from megaflow_stream.runtime.services import credentials, kafka_probe, ports, process, s3_probe, state
from megaflow_stream.runtime.services.credentials import Credentials
from megaflow_stream.runtime.services.kafka import Kafka, server_properties
from megaflow_stream.runtime.services.process import Launch
from megaflow_stream.runtime.services.seaweedfs import SeaweedFS, weed
from megaflow_stream.runtime.services.service import NotReady
from megaflow_stream.runtime.services.state import Instance, State, User


def test_ports_differ_and_lie_below_those_of_outgoing_connections() -> None:
    names = [f"p{i}" for i in range(40)]
    found = ports.choose(names, {})
    assert sorted(found) == sorted(names)
    assert len(set(found.values())) == 40
    first = int(ports.RANGE_FILE.read_text().split()[0]) if ports.RANGE_FILE.exists() else 65_536
    assert all(ports.LOWEST <= port < max(first, ports.LOWEST + 2_000) or first < 22_000 for port in found.values())


def test_a_port_is_kept_while_it_is_free() -> None:
    kept = ports.choose(["a", "b"], {})
    assert ports.choose(["a", "b"], kept) == kept
    with socket.socket() as other:
        other.bind(("127.0.0.1", kept["a"]))
        other.listen()
        again = ports.choose(["a", "b"], kept)
    assert again["a"] != kept["a"]
    assert again["b"] == kept["b"]


def test_credentials_are_made_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    made = credentials.load_or_make(tmp_path, authenticate=True)
    assert credentials.load_or_make(tmp_path, authenticate=True) == made
    mode = (tmp_path / credentials.FILE).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert len(made.kafka_password) >= 24
    assert made.kafka_password not in repr(made)
    assert made.secret_key not in repr(made)


def test_damaged_credentials_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / credentials.FILE).write_text("{")
    with pytest.raises(MegaflowError, match="cannot be read") as caught:
        credentials.load_or_make(tmp_path, authenticate=True)
    assert "services down" in caught.value.hint


def test_a_broker_with_a_password_asks_for_it_on_every_listener() -> None:
    ports_ = {"client": 20001, "controller": 20002}
    users = Credentials(kafka_username="u", kafka_password="p", access_key="a", secret_key="s")
    text = server_properties("data", ports_, users)
    assert "listener.security.protocol.map=CLIENT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT\n" in text
    assert "listeners=CLIENT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002\n" in text
    assert "auto.create.topics.enable=false\n" in text
    free = server_properties(
        "data", ports_, Credentials(kafka_username="u", kafka_password="", access_key="a", secret_key="s")
    )
    assert "CLIENT:PLAINTEXT" in free
    assert "jaas" not in free


def test_the_s3_server_phones_nobody_and_binds_to_this_machine_alone(tmp_path: Path) -> None:
    service = SeaweedFS()
    numbers = {name: 20_000 + i for i, name in enumerate(service.port_names)}
    users = credentials.load_or_make(tmp_path, authenticate=True)
    launch = service.prepare(tmp_path, numbers, users, 0, print)
    assert Path(launch.argv[0]) == weed()
    assert os.access(weed(), os.X_OK)
    assert {"-ip.bind=127.0.0.1", "-master.telemetry=false", "-master.volumePreallocate=false"} <= set(launch.argv)
    assert launch.marker in launch.argv
    assert users.secret_key not in " ".join(launch.argv)
    assert stat.S_IMODE((tmp_path / "s3" / "identities.json").stat().st_mode) == 0o600


def test_the_state_file_holds_what_was_saved(tmp_path: Path) -> None:
    saved = State(keep=True, users=[User.me()], services={"kafka": Instance(pid=7, started=1.5, ports={"client": 2})})
    saved.save(tmp_path)
    assert state.load(tmp_path) == saved
    assert state.load(tmp_path / "nothing") == State()
    (tmp_path / state.FILE).write_text('{"keep": tru')
    assert state.load(tmp_path) == State()


def test_a_user_whose_pid_was_given_to_somebody_else_is_gone() -> None:
    me = User.me()
    assert me.is_alive()
    assert not User(pid=me.pid, started=me.started - 3600).is_alive()


async def test_the_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    inside, most = 0, 0

    async def change() -> None:
        nonlocal inside, most
        async with state.locked(tmp_path, print):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(change() for _ in range(5)))
    assert most == 1


def _launch(tmp_path: Path, code: str, marker: str) -> Launch:
    return Launch(
        argv=[sys.executable, "-c", code, marker],
        marker=marker,
        cwd=tmp_path,
        log=tmp_path / "logs" / "it.log",
        environment={"GREETING": "hello"},
    )


async def _written(launch: Launch) -> None:
    """Returns once the process has written its first line: the suite's own bound ends it otherwise."""
    for _ in range(10_000):
        if process.last_lines(launch.log):
            return
        await asyncio.sleep(0.01)


async def test_a_spawned_process_is_a_daemon_with_its_log(tmp_path: Path) -> None:
    code = "import os, signal; print(os.getcwd(), os.environ['GREETING'], flush=True); signal.pause()"
    launch = _launch(tmp_path, code, f"-marker={tmp_path}")
    pid = process.spawn(launch)
    assert process.is_alive(pid, launch.marker)
    assert os.getsid(pid) == pid  # Ctrl-C at our terminal does not reach it
    await _written(launch)
    assert process.last_lines(launch.log) == f"{tmp_path} hello"
    assert process.find(launch.marker) == [pid]
    assert await process.end(pid, launch.marker, grace_seconds=30)
    assert process.find(launch.marker) == []


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); signal.pause()"
    launch = _launch(tmp_path, code, f"-marker={tmp_path}")
    pid = process.spawn(launch)
    await _written(launch)
    assert not await process.end(pid, launch.marker, grace_seconds=0.1)
    assert not process.is_alive(pid, launch.marker)


async def test_a_recycled_pid_is_not_believed_and_not_ended(tmp_path: Path) -> None:
    """The state file names a live process that is not the service: somebody who was given its pid later."""
    code = "import sys; sys.stdin.read()"
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE)
    try:
        instance = Instance(pid=stranger.pid, started=1.0, ports={"client": 20001, "controller": 20002})
        State(keep=True, services={"kafka": instance}).save(tmp_path)
        credentials.load_or_make(tmp_path, authenticate=True)
        assert services.dead(tmp_path) == ["kafka"]
        assert [(found.name, found.state, found.pid) for found in await services.status(tmp_path)] == [
            ("kafka", "died", None),
            ("s3", "stopped", None),
        ]
        assert await services.down(tmp_path) == []
        assert stranger.returncode is None
    finally:
        await stranger.communicate(b"")


def test_the_probes_say_what_they_met(tmp_path: Path) -> None:
    free = ports.choose(["it"], {})["it"]
    with pytest.raises(NotReady, match="refused"):
        kafka_probe.brokers("127.0.0.1", free)
    with pytest.raises(NotReady, match="refused"):
        s3_probe.request("GET", "/", host="127.0.0.1", port=free, access_key="a", secret_key="s")
    with socket.create_server(("127.0.0.1", free)) as silent:
        assert silent is not None
        with pytest.raises(NotReady, match="timed out"):
            kafka_probe.brokers("127.0.0.1", free, timeout_seconds=0.05)


def test_the_markers_of_two_projects_differ(tmp_path: Path) -> None:
    for service in (Kafka(), SeaweedFS()):
        assert service.marker(tmp_path / "a") != service.marker(tmp_path / "b")
