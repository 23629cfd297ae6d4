"""A project's Kafka and S3: up, down, status, and again after one of them died.

They are daemons of the project, not children of a command: they outlive what started them, and the next command finds
them by the state file. One command at a time changes anything (the lock in `state`). Without `services up` they stay
for as long as a command that uses them lives; the last one stops them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megaflow_stream.bus.security import Security
from megaflow_stream.config.settings import Settings
from megaflow_stream.errors import MegaflowError, ServiceUnreachable
from megaflow_stream.runtime.services import process
from megaflow_stream.runtime.services import state as states
from megaflow_stream.runtime.services.credentials import Credentials, load, load_or_make
from megaflow_stream.runtime.services.endpoints import Endpoints
from megaflow_stream.runtime.services.kafka import HOST, Kafka
from megaflow_stream.runtime.services.seaweedfs import SeaweedFS
from megaflow_stream.runtime.services.service import NotReady, Say, Service
from megaflow_stream.runtime.services.starting import end_all, make_ready
from megaflow_stream.runtime.services.state import Instance, State, User

SERVICES: tuple[Service, ...] = (Kafka(), SeaweedFS())


def _silent(line: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStatus:
    """One service as it is now. state: running, not answering, died (it should run and does not), stopped."""

    name: str
    state: str
    detail: str
    address: str
    pid: int | None
    started: float | None
    memory_bytes: int | None
    data_bytes: int
    log: Path


async def up(
    state_dir: Path,
    settings: Settings | None = None,
    *,
    kafka: bool = True,
    s3: bool = True,
    authenticate: bool = True,
    keep: bool = True,
    user: User | None = None,
    say: Say = _silent,
    announce: str = "",
) -> Endpoints:
    """Both services, or the one asked for, answer when this returns; those that run are left as they are.

    authenticate: whether a broker that is started for the first time asks for credentials. keep: they stay until
    `down`; else until `user` and all other users have released them. announce: said once, if anything has to be
    started. Raises `ServiceUnreachable`, `Damaged`.
    """
    settings = settings or Settings()
    state_dir = state_dir.resolve()
    wanted = [service for service in SERVICES if {"kafka": kafka, "s3": s3}[service.name]]
    async with states.locked(state_dir, say) as state:
        credentials = load_or_make(state_dir, authenticate=authenticate)
        state.kafka_memory_bytes = settings.services.kafka_memory_bytes
        if announce and any(not _is_alive(service, state_dir, state) for service in wanted):
            say(announce)
        state.users = [other for other in state.users if other != user and other.is_alive()]
        try:
            await _all_ready(wanted, state_dir, state, credentials, say, settings.services.start_seconds)
        except BaseException:
            if not state.keep and not state.users:
                await _stop(state_dir, state)
            raise
        state.keep = state.keep or keep
        if user is not None:
            state.users.append(user)
        state.save(state_dir)
    return _endpoints(state, credentials, wanted)


async def down(state_dir: Path, *, say: Say = _silent) -> list[str]:
    """Stops both, whoever uses them; names those that ran. Their data, ports and credentials stay."""
    state_dir = state_dir.resolve()
    if not state_dir.is_dir():
        return []
    async with states.locked(state_dir, say) as state:
        return await _stop(state_dir, state)


async def release(state_dir: Path, user: User) -> list[str]:
    """`user` needs them no more: they are stopped if nobody else does and `services up` was not said."""
    state_dir = state_dir.resolve()
    async with states.locked(state_dir, _silent) as state:
        state.users = [other for other in state.users if other != user and other.is_alive()]
        state.save(state_dir)
        if state.keep or state.users:
            return []
        return await _stop(state_dir, state)


async def restart_dead(
    state_dir: Path, settings: Settings | None = None, *, stops: int | None = None, say: Say = _silent
) -> list[str]:
    """Starts those that died, on the same data and port; names them. One that was stopped on purpose stays so.

    stops: of the endpoints that the caller uses. Raises `ServiceUnreachable` where they were stopped on purpose since,
    whoever has started them again.
    """
    settings, state_dir = settings or Settings(), state_dir.resolve()
    _refuse_stopped(states.load(state_dir), stops)
    if not dead(state_dir):
        return []
    async with states.locked(state_dir, say) as state:
        _refuse_stopped(state, stops)  # what looked dead was about to be
        credentials = load(state_dir)
        if credentials is None:
            raise MegaflowError("the credentials of the embedded services are gone", hint="`megaflow services up`")
        wanted = [service for service in SERVICES if _should_run(service, state)]
        started = await _all_ready(wanted, state_dir, state, credentials, say, settings.services.start_seconds)
        state.save(state_dir)
        return started


def _refuse_stopped(state: State, stops: int | None) -> None:
    if stops is not None and state.stops > stops:
        raise ServiceUnreachable(
            "Kafka and S3 were stopped by `megaflow services down`",
            hint="run it again: it starts them, and goes on from what was committed",
        )


def dead(state_dir: Path) -> list[str]:
    """The services that should run and do not: a look at two processes, cheap enough for every second."""
    state_dir = state_dir.resolve()
    state = states.load(state_dir)
    return [
        service.name for service in SERVICES if _should_run(service, state) and not _is_alive(service, state_dir, state)
    ]


async def status(state_dir: Path) -> list[ServiceStatus]:
    """Both services, each asked over its own protocol. Changes nothing."""
    state_dir = state_dir.resolve()
    state, credentials = states.load(state_dir), load(state_dir)
    return [await asyncio.to_thread(_status, service, state_dir, state, credentials) for service in SERVICES]


async def _all_ready(
    wanted: Sequence[Service],
    state_dir: Path,
    state: State,
    credentials: Credentials,
    say: Say,
    start_seconds: float,
) -> list[str]:
    tasks = [
        asyncio.create_task(make_ready(service, state_dir, state, credentials, say, start_seconds=start_seconds))
        for service in wanted
    ]
    try:
        started = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [service.name for service, new in zip(wanted, started, strict=True) if new]


async def _stop(state_dir: Path, state: State) -> list[str]:
    counts = await asyncio.gather(*(end_all(service, state_dir) for service in SERVICES))
    for service in SERVICES:
        instance = state.services.setdefault(service.name, Instance())
        instance.pid = None
        service.sweep(instance.ports)
    state.keep, state.users, state.stops = False, [], state.stops + 1
    state.save(state_dir)
    return [service.name for service, count in zip(SERVICES, counts, strict=True) if count]


def _should_run(service: Service, state: State) -> bool:
    return service.name in state.services and state.services[service.name].pid is not None


def _is_alive(service: Service, state_dir: Path, state: State) -> bool:
    instance = state.services.get(service.name, Instance())
    return instance.pid is not None and process.is_alive(instance.pid, service.marker(state_dir))


def _endpoints(state: State, credentials: Credentials, wanted: Sequence[Service]) -> Endpoints:
    at = {service.name: state.services[service.name] for service in wanted}
    security = Security()
    if credentials.kafka_password:
        security = Security(
            protocol="SASL_PLAINTEXT", username=credentials.kafka_username, password=credentials.kafka_password
        )
    return Endpoints(
        bootstrap_servers=f"{HOST}:{at['kafka'].ports['client']}" if "kafka" in at else "",
        security=security,
        endpoint_url=f"http://{HOST}:{at['s3'].ports['s3']}" if "s3" in at else "",
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        stops=state.stops,
        pids={name: instance.pid for name, instance in at.items() if instance.pid is not None},
    )


def _status(service: Service, state_dir: Path, state: State, credentials: Credentials | None) -> ServiceStatus:
    instance = state.services.get(service.name, Instance())
    alive = _is_alive(service, state_dir, state)
    condition, detail = ("died" if instance.pid is not None else "stopped"), ""
    memory_bytes = None
    if alive and credentials is not None:
        try:
            service.check(instance.ports, credentials, 2.0)
            condition = "running"
        except NotReady as problem:
            condition, detail = "not answering", str(problem)
        try:
            memory_bytes = psutil.Process(instance.pid).memory_info().rss
        except psutil.Error:
            memory_bytes = None
    port = instance.ports.get(service.port_names[0])
    return ServiceStatus(
        name=service.name,
        state=condition,
        detail=detail,
        address="" if port is None else f"{'http://' if service.name == 's3' else ''}{HOST}:{port}",
        pid=instance.pid if alive else None,
        started=instance.started if alive else None,
        memory_bytes=memory_bytes,
        data_bytes=_size_bytes(state_dir / service.name),
        log=state_dir / "logs" / f"{service.name}.log",
    )


def _size_bytes(folder: Path) -> int:
    """What the folder takes on the disk: the broker's index files are mostly holes."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except OSError:  # a segment that was deleted meanwhile
            continue
    return total
