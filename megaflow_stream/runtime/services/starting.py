"""From a service that may or may not run to one that answers: adopt it, or start it on its data and its ports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil

from megaflow_stream.errors import ServiceUnreachable
from megaflow_stream.runtime.services import ports, process
from megaflow_stream.runtime.services.background import in_background
from megaflow_stream.runtime.services.credentials import Credentials
from megaflow_stream.runtime.services.service import NotReady, Say, Service
from megaflow_stream.runtime.services.state import Instance, State

ADOPT_SECONDS = 20.0  # for one that lives, but may be starting still
CHECK_SECONDS = 2.0
ATTEMPTS = 3  # another program may take a port between our look and the service's bind


async def make_ready(
    service: Service, state_dir: Path, state: State, credentials: Credentials, say: Say, *, start_seconds: float
) -> bool:
    """The service answers when this returns; True where a process was started for it.

    The caller holds the lock. A process of the project that lives is adopted; one that does not answer is ended
    first. Raises `ServiceUnreachable` with the end of the service's log. A process that this call started does not
    outlive its failure or cancellation.
    """
    instance = state.services.setdefault(service.name, Instance())
    marker = service.marker(state_dir)
    if instance.pid is not None and process.is_alive(instance.pid, marker):
        if await _answers(service, instance.pid, marker, instance.ports, credentials, ADOPT_SECONDS) is None:
            return False
        say(f"{service.title} (pid {instance.pid}) does not answer: starting it again")
    await end_all(service, state_dir)  # whatever lives on that data and no state file knows, too
    problem = ""
    for _ in range(ATTEMPTS):
        wanted = dict(instance.ports)
        instance.ports = ports.choose(service.port_names, wanted)
        first = service.port_names[0]
        if wanted.get(first, instance.ports[first]) != instance.ports[first]:
            say(f"port {wanted[first]} is taken: {service.title} is at port {instance.ports[first]} now")
        launch = await in_background(
            partial(service.prepare, state_dir, instance.ports, credentials, state.kafka_memory_bytes, say)
        )
        instance.pid = process.spawn(launch)
        instance.started = psutil.Process(instance.pid).create_time()
        state.save(state_dir)
        try:
            found = await _answers(service, instance.pid, marker, instance.ports, credentials, start_seconds)
        except BaseException:
            await end_all(service, state_dir)
            raise
        if found is None:
            return True
        problem = f"{found}; the end of its log, {launch.log}:\n{process.last_lines(launch.log)}"
        if process.is_alive(instance.pid, marker):
            await end_all(service, state_dir)
            break
        if "ddress already in use" not in problem:
            break
    raise ServiceUnreachable(f"{service.title} could not be started: {problem}")


async def end_all(service: Service, state_dir: Path) -> int:
    """Ends every process of this project's service; how many there were."""
    marker = service.marker(state_dir)
    found = await asyncio.to_thread(process.find, marker)
    await asyncio.gather(*(process.end(pid, marker, grace_seconds=service.stop_seconds) for pid in found))
    return len(found)


async def _answers(
    service: Service,
    pid: int,
    marker: str,
    at: Mapping[str, int],
    credentials: Credentials,
    bound_seconds: float,
) -> str | None:
    """None once the service answers; else what it did, when it died or the bound is over."""
    begun = time.monotonic()
    while True:
        try:
            await asyncio.to_thread(service.check, at, credentials, CHECK_SECONDS)
            return None
        except NotReady as problem:
            waited = time.monotonic() - begun
            if not process.is_alive(pid, marker):
                return f"it ended by itself after {waited:.1f} s"
            if waited > bound_seconds:
                return f"it did not answer within {bound_seconds:.0f} s ({problem})"
        await asyncio.sleep(0.05)
