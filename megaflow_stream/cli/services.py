"""`megaflow services`: the project's embedded Kafka and S3."""

from __future__ import annotations

import asyncio
import time

import click

from megaflow_stream.cli.context import Context, command_options, print_json, print_table, say
from megaflow_stream.errors import SettingError
from megaflow_stream.runtime import services as embedded


@click.group()
def services() -> None:
    """The project's embedded services: an Apache Kafka and an S3 server on 127.0.0.1.

    \b
    Example:
      megaflow services up
      megaflow services status --json | jq -r '.services[].address'
    """


@services.command()
@command_options
def up(context: Context) -> None:
    """Start Kafka and S3, or find them running; they stay up until `services down`.

    A service that the settings give an address for is not started. The first start on a machine downloads Kafka's
    jars (45 MB) into a cache that all projects share.

    \b
    Example:
      megaflow services up
    """
    given = context.settings
    kafka, s3 = given.kafka.bootstrap_servers is None, given.s3.endpoint_url is None
    if not kafka and not s3:
        raise SettingError(
            "the settings name an existing Kafka and an existing S3: there is nothing to start",
            hint="`megaflow config show` says where each address comes from",
        )
    begun = time.monotonic()
    found = asyncio.run(
        embedded.up(
            context.project.state_dir, given, kafka=kafka, s3=s3, say=say, announce="starting the embedded services"
        )
    )
    if context.json:
        print_json(
            {
                "bootstrap_servers": found.bootstrap_servers or None,
                "security_protocol": found.security.protocol if kafka else None,
                "endpoint_url": found.endpoint_url or None,
                "pids": dict(found.pids),
                "credentials_file": context.project.state_dir / "credentials.json",
                "seconds": round(time.monotonic() - begun, 3),
            }
        )
        return
    for name, address in (("Kafka", found.bootstrap_servers), ("S3", found.endpoint_url)):
        if address:
            say(f"{name} is up at {address}")
    say(f"credentials: {context.project.state_dir / 'credentials.json'} (readable by you alone)")


@services.command()
@command_options
def down(context: Context) -> None:
    """Stop Kafka and S3. Their data stays, and so do their ports and credentials.

    \b
    Example:
      megaflow services down
    """
    stopped = asyncio.run(embedded.down(context.project.state_dir, say=say))
    if context.json:
        print_json({"stopped": stopped})
    else:
        say(f"stopped {' and '.join(stopped)}" if stopped else "neither was running")


@services.command()
@command_options
def status(context: Context) -> int:
    """Both services as they are now: state, address, memory, disk. Exit code 3 where one died or does not answer.

    \b
    Example:
      megaflow services status
    """
    found = asyncio.run(embedded.status(context.project.state_dir))
    if context.json:
        print_json({"services": found})
    else:
        rows = [
            (
                item.name,
                item.state + (f": {item.detail}" if item.detail else ""),
                item.address,
                item.pid,
                _mebibytes(item.memory_bytes),
                _mebibytes(item.data_bytes),
                item.log,
            )
            for item in found
        ]
        print_table(("service", "state", "address", "pid", "memory", "disk", "log"), rows)
    return 3 if any(item.state in ("died", "not answering") for item in found) else 0


def _mebibytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / (1 << 20):.0f} MiB"
