"""`megaflow init`: a new project."""

from __future__ import annotations

from pathlib import Path

import click

from megaflow_stream.cli.context import print_json, say
from megaflow_stream.project import scaffold


@click.command()
@click.argument("target", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def init(target: Path, as_json: bool) -> None:
    """Make a new project in DIR, a new or empty folder: the reference pipeline, ready to run.

    \b
    Example:
      megaflow init demo && cd demo && megaflow run --until-idle
    """
    made = scaffold.init(target)
    if as_json:
        print_json({"project": made})
        return
    click.echo(made)
    say(
        "a new project: topics/ processors/ trainers/ infra/ pipeline.yaml\n"
        f"  next: cd {target} && megaflow run --until-idle"
    )
