"""A real embedded Kafka and S3 of one project: found again, one instance, kill -9 loses nothing acknowledged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from megaflow_stream import bus, storage
from megaflow_stream.bus import TopicDescription, TopicPartition
from megaflow_stream.errors import ServiceUnreachable
from megaflow_stream.project.folder import Project, find
from megaflow_stream.runtime import services
from megaflow_stream.runtime.connection import connected
from megaflow_stream.runtime.services import Endpoints, kafka_probe, s3_probe
from megaflow_stream.runtime.services.service import NotReady

pytestmark = pytest.mark.xdist_group("embedded services")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose services are stopped at the end, whatever the tests did."""
    root = tmp_path_factory.mktemp("services") / "a project"  # a space: paths go into arguments and files
    root.mkdir()
    (root / "pipeline.yaml").write_text("pipeline: []\n")
    found = find(root)
    yield found
    asyncio.run(services.down(found.state_dir))


def _command(project: Project, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGAFLOW_KAFKA__")}
    return subprocess.Popen(
        [sys.executable, "-m", "megaflow_stream.cli.main", "services", *arguments, "--project", str(project.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@asynccontextmanager
async def _opened(found: Endpoints) -> AsyncIterator[tuple[bus.Bus, storage.ObjectStore]]:
    opened = await bus.connect(found.bootstrap_servers, security=found.security)
    store = await storage.connect(
        endpoint_url=found.endpoint_url, bucket="kept", access_key=found.access_key, secret_key=found.secret_key
    )
    try:
        yield opened, store
    finally:
        await store.close()
        await opened.close()


async def _values(opened: bus.Bus, topic: str) -> list[bytes | None]:
    partition = TopicPartition(topic, 0)
    end = (await opened.end_offsets([partition]))[partition]
    reader = await opened.reader()
    reader.assign({partition: 0})
    found: list[bytes | None] = []
    while await reader.position(partition) < end:
        for records in (await reader.fetch()).values():
            found += [record.value for record in records]
    await reader.close()
    return found


def test_two_commands_at_once_start_one_instance(project: Project) -> None:
    both = [_command(project, "up", "--json") for _ in range(2)]
    results = [command.communicate() for command in both]
    assert [command.returncode for command in both] == [0, 0], results
    first, second = (json.loads(output) for output, _ in results)
    assert first["pids"] == second["pids"]
    assert first["bootstrap_servers"] == second["bootstrap_servers"]
    assert stat.S_IMODE(Path(first["credentials_file"]).stat().st_mode) == 0o600

    status = _command(project, "status", "--json")
    found = json.loads(status.communicate()[0])["services"]
    assert status.returncode == 0
    assert [(item["name"], item["state"], item["pid"]) for item in found] == [
        ("kafka", "running", first["pids"]["kafka"]),
        ("s3", "running", first["pids"]["s3"]),
    ]


@pytest.mark.parametrize("name", ["dé", "a,b"])
def test_any_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also without a locale, by which Java would read file names."""
    monkeypatch.setenv("LC_ALL", "C")
    root = tmp_path / name
    root.mkdir()
    (root / "pipeline.yaml").write_text("pipeline: []\n")
    other = find(root)
    try:
        command = _command(other, "up")
        _, errors = command.communicate()
        assert command.returncode == 0, errors
    finally:
        asyncio.run(services.down(other.state_dir))
    assert list(tmp_path.iterdir()) == [root]
    assert {path.name for path in root.iterdir()} == {"pipeline.yaml", ".megaflow"}
    assert {path.name for path in (other.state_dir / "kafka").iterdir()} == {"data", "server.properties"}


async def test_without_the_credentials_nobody_gets_in(project: Project) -> None:
    found = await services.up(project.state_dir)
    host, port = found.bootstrap_servers.split(":")
    with pytest.raises(NotReady):
        kafka_probe.brokers(host, int(port))
    with pytest.raises(NotReady, match="refuses"):
        kafka_probe.brokers(host, int(port), username="megaflow", password="guess")
    s3_port = int(found.endpoint_url.rsplit(":", 1)[1])
    for access_key, secret_key in (("somebody", "guess"), (found.access_key, "guess")):
        with pytest.raises(NotReady, match="HTTP 403"):
            s3_probe.request("GET", "/", host=host, port=s3_port, access_key=access_key, secret_key=secret_key)


async def test_kill_9_of_both_loses_nothing_acknowledged(project: Project) -> None:
    """Started again on the same data and ports: what was acknowledged before the kill is there."""
    before = await services.up(project.state_dir)
    async with _opened(before) as (opened, store):
        await opened.create_topic(TopicDescription("kept", 1))
        producer = await opened.producer()
        sent = [await producer.send("kept", f"{i}".encode(), partition=0) for i in range(500)]
        assert await asyncio.gather(*sent) == list(range(500))
        transactional = await opened.producer("kept-1")
        await transactional.begin()
        await transactional.commit([await transactional.send("kept", b"committed", partition=0)])
        await transactional.close()
        await producer.close()
        for i in range(20):
            await store.put(f"object/{i}", f"{i}".encode() * 100_000)

    for pid in before.pids.values():
        os.kill(pid, signal.SIGKILL)
    while len(services.dead(project.state_dir)) < 2:
        await asyncio.sleep(0.01)
    assert await services.restart_dead(project.state_dir) == ["kafka", "s3"]

    after = await services.up(project.state_dir)
    assert after.bootstrap_servers == before.bootstrap_servers
    assert after.endpoint_url == before.endpoint_url
    assert not set(after.pids.values()) & set(before.pids.values())
    async with _opened(after) as (opened, store):
        assert await _values(opened, "kept") == [f"{i}".encode() for i in range(500)] + [b"committed"]
        for i in range(20):
            assert (await store.get(f"object/{i}"))[0] == f"{i}".encode() * 100_000


async def test_the_one_that_died_is_started_again_and_the_other_is_not_touched(project: Project) -> None:
    before = await services.up(project.state_dir)
    assert await services.restart_dead(project.state_dir) == []
    os.kill(before.pids["s3"], signal.SIGKILL)
    after = await services.up(project.state_dir)
    assert after.pids["kafka"] == before.pids["kafka"]
    assert after.pids["s3"] != before.pids["s3"]


async def test_what_was_stopped_on_purpose_is_not_started_again(project: Project) -> None:
    """Whoever used them before is told so, also when somebody else has started them again."""
    before = await services.up(project.state_dir)
    assert await services.restart_dead(project.state_dir, stops=before.stops) == []
    await services.down(project.state_dir)
    assert await services.restart_dead(project.state_dir) == []
    with pytest.raises(ServiceUnreachable, match="stopped by `megaflow services down`"):
        await services.restart_dead(project.state_dir, stops=before.stops)
    assert [item.state for item in await services.status(project.state_dir)] == ["stopped", "stopped"]
    after = await services.up(project.state_dir, kafka=False)
    with pytest.raises(ServiceUnreachable, match="stopped by `megaflow services down`"):
        await services.restart_dead(project.state_dir, stops=before.stops)
    assert await services.restart_dead(project.state_dir, stops=after.stops) == []


async def test_a_lost_state_file_leaves_no_second_broker_on_the_data(project: Project) -> None:
    """The process is known by its arguments: it is ended before another is started on its data."""
    before = await services.up(project.state_dir, s3=False)
    (project.state_dir / "services.json").unlink()
    after = await services.up(project.state_dir, s3=False)
    assert after.pids["kafka"] != before.pids["kafka"]
    with pytest.raises(ProcessLookupError):
        os.kill(before.pids["kafka"], 0)


async def test_a_command_starts_them_for_itself_and_the_last_user_stops_them(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    async with connected(project, project.settings, s3=False) as first:
        await first.bus.create_topic(TopicDescription("left", 1))
        while "left" not in await first.bus.topics():
            await asyncio.sleep(0.1)
    await services.down(project.state_dir)
    capsys.readouterr()
    async with connected(project, project.settings) as outer:
        assert "starting this project's Kafka and S3 for this command" in capsys.readouterr().err
        async with asyncio.timeout(15):  # still there, once the broker has read it
            while "left" not in await outer.bus.topics():
                await asyncio.sleep(0.1)
        code = (
            "import asyncio, sys; from pathlib import Path\n"
            "from megaflow_stream.project.folder import find\n"
            "from megaflow_stream.runtime.connection import connected\n"
            "async def main():\n"
            "    project = find(Path(sys.argv[1]))\n"
            "    async with connected(project, project.settings) as inner:\n"
            "        print(inner.endpoints.pids['kafka'])\n"
            "asyncio.run(main())\n"
        )
        other = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            code,
            str(project.root),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await other.communicate()
        assert other.returncode == 0, errors
        assert b"starting" not in errors
        assert int(output) == outer.endpoints.pids["kafka"]
        assert [item.state for item in await services.status(project.state_dir)] == ["running", "running"]
    assert [item.state for item in await services.status(project.state_dir)] == ["stopped", "stopped"]


async def test_existing_services_are_used_and_nothing_is_started(
    project: Project, kafka: str, s3: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS", kafka)
    for name in ("endpoint_url", "access_key", "secret_key"):
        monkeypatch.setenv(f"MEGAFLOW_S3__{name.upper()}", getattr(s3, name))
    root = project.root.parent / "other"
    root.mkdir()
    (root / "pipeline.yaml").write_text("pipeline: []\n")
    other = find(root)
    async with connected(other, other.settings) as connection:
        assert connection.endpoints.bootstrap_servers == kafka
        assert connection.endpoints.pids == {}
        await connection.bus.topics()
        assert await connection.store.head("nothing") is None
    assert not other.state_dir.exists()
