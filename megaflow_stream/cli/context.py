"""What every command shares: the options that name the project and its services, and how data is printed.

    @click.command()
    @click.argument("name")
    @command_options
    def show(context: Context, name: str) -> None: ...

Data goes to stdout, one JSON document with `--json`; everything else to stderr.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import orjson

from megaflow_stream import logs
from megaflow_stream.config.settings import Settings
from megaflow_stream.project.folder import Project, find


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a command works on. `json` says that stdout takes JSON and nothing else."""

    project: Project
    settings: Settings
    origins: Mapping[str, str]
    json: bool


def command_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the shared options, and passes a `Context` first. Wrong settings end the command before it begins."""

    @click.option(
        "--project",
        "project_dir",
        type=click.Path(path_type=Path),
        help="The project's folder.  [default: the current one]",
    )
    @click.option("--bootstrap-servers", metavar="HOST:PORT", help="An existing Kafka, in place of the embedded one.")
    @click.option("--s3-endpoint-url", metavar="URL", help="An existing S3, in place of the embedded one.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
    @click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
    @functools.wraps(command)
    def wrapped(
        *,
        project_dir: Path | None,
        bootstrap_servers: str | None,
        s3_endpoint_url: str | None,
        as_json: bool,
        debug: bool,
        **options: Any,
    ) -> Any:
        flags = {"kafka.bootstrap_servers": bootstrap_servers, "s3.endpoint_url": s3_endpoint_url}
        here = click.get_current_context()
        before = here.find_root().params  # options given before the command
        project = find(project_dir or before.get("project_dir"), flags)
        stages = project.loaded.document.get("pipeline")
        if stages is not None and stages.value not in (None, []):  # without any there are still services and topics
            project.pipeline()
        debug = debug or bool(before.get("debug"))
        level = "debug" if debug else project.settings.log_level
        logs.setup(here.command_path.removeprefix("megaflow "), getattr(logging, level.upper()))
        context = Context(project=project, settings=project.settings, origins=project.loaded.origins, json=as_json)
        return command(context, **options)

    return wrapped


def say(message: str) -> None:
    """A message for a person, on stderr."""
    click.echo(message, err=True)


def print_json(data: Any) -> None:
    """One JSON document on one line of stdout. Bytes and paths are text, dataclasses are objects."""
    sys.stdout.write(orjson.dumps(data, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode() + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under headings: drawn by rich on a terminal, plain and aligned where there is none."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, cells)
        return
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    for row in [list(columns), *cells]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _draw(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))  # Text: brackets in a value are no markup
    Console().print(table)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
