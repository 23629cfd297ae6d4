"""How a command gets its bus and its store: existing services where the settings name them, else the project's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import click

from megaflow_stream import bus as buses
from megaflow_stream import storage
from megaflow_stream.bus import Bus
from megaflow_stream.bus.security import Security
from megaflow_stream.config.settings import Settings
from megaflow_stream.errors import UsageError
from megaflow_stream.project.folder import Project
from megaflow_stream.runtime import services
from megaflow_stream.runtime.services import Endpoints, User
from megaflow_stream.storage import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """An open bus and store, and where they are (to hand on to child processes)."""

    endpoints: Endpoints
    opened_bus: Bus | None = None
    opened_store: ObjectStore | None = None

    @property
    def bus(self) -> Bus:
        if self.opened_bus is None:
            raise UsageError("this command did not ask for Kafka")
        return self.opened_bus

    @property
    def store(self) -> ObjectStore:
        if self.opened_store is None:
            raise UsageError("this command did not ask for S3")
        return self.opened_store


@asynccontextmanager
async def connected(
    project: Project, settings: Settings, *, kafka: bool = True, s3: bool = True, keep: bool | None = None
) -> AsyncIterator[Connection]:
    """A bus and a store for the duration of the block.

    What the settings give an address for is used there, and nothing is started for it. The rest is the project's
    embedded services: they are started where they are down, and stopped again at the end, unless `keep`, or
    `megaflow services up` was said, or another command uses them still.

    Raises `ServiceUnreachable` (also where a part of Kafka could not be downloaded), `Damaged`.
    """
    async with AsyncExitStack() as stack:
        endpoints = await stack.enter_async_context(located(project, settings, kafka=kafka, s3=s3, keep=keep))
        opened_bus, opened_store = None, None
        if kafka:
            opened_bus = await buses.connect(endpoints.bootstrap_servers, security=endpoints.security)
            stack.push_async_callback(opened_bus.close)
        if s3:
            opened_store = await storage.connect(
                endpoint_url=endpoints.endpoint_url,
                bucket=settings.s3.bucket,
                access_key=endpoints.access_key,
                secret_key=endpoints.secret_key,
                region=endpoints.region,
            )
            stack.push_async_callback(opened_store.close)
        yield Connection(endpoints=endpoints, opened_bus=opened_bus, opened_store=opened_store)


@asynccontextmanager
async def located(
    project: Project, settings: Settings, *, kafka: bool = True, s3: bool = True, keep: bool | None = None
) -> AsyncIterator[Endpoints]:
    """The same without connecting: the addresses alone, good for the duration of the block."""
    own_kafka = kafka and settings.kafka.bootstrap_servers is None
    own_s3 = s3 and settings.s3.endpoint_url is None
    found = Endpoints()
    if not own_kafka and not own_s3:
        yield _given(found, settings, kafka=kafka, s3=s3)
        return
    user = User.me()
    names = " and ".join(name for name, own in (("Kafka", own_kafka), ("S3", own_s3)) if own)
    them = "them" if own_kafka and own_s3 else "it"
    begun = f"starting this project's {names}"
    found = await services.up(
        project.state_dir,
        settings,
        kafka=own_kafka,
        s3=own_s3,
        keep=bool(keep),
        user=user,
        say=lambda line: click.echo(line, err=True),
        announce=begun if keep else f"{begun} for this command; `megaflow services up` keeps {them} up",
    )
    try:
        yield _given(found, settings, kafka=kafka and not own_kafka, s3=s3 and not own_s3)
    finally:
        await services.release(project.state_dir, user)


def _given(found: Endpoints, settings: Settings, *, kafka: bool, s3: bool) -> Endpoints:
    """The endpoints with those that the settings give."""
    if kafka:
        given = settings.kafka
        found = replace(
            found,
            bootstrap_servers=given.bootstrap_servers or "",
            security=Security(
                protocol=given.security_protocol,
                mechanism=given.sasl_mechanism,
                username=given.username,
                password=given.password,
                ca_file=given.ca_file,
            ),
        )
    if s3:
        found = replace(
            found,
            endpoint_url=settings.s3.endpoint_url or "",
            access_key=settings.s3.access_key,
            secret_key=settings.s3.secret_key,
            region=settings.s3.region,
        )
    return found
