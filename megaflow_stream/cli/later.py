"""Commands whose names are fixed and whose work comes with a later version: they say so, and exit 2."""

from __future__ import annotations

import click

from megaflow_stream.errors import UsageError


def _later(name: str, does: str, instead: str) -> click.Command:
    def say_so(rest: tuple[str, ...]) -> None:
        raise UsageError(f"`megaflow {name}` is not in this version yet: it will {does}", hint=instead)

    return click.Command(
        name.rsplit(" ", 1)[-1],
        callback=say_so,
        params=[click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        help=f"Not in this version yet: will {does}.\n\n\b\nExample:\n  megaflow {name} --help",
        short_help=f"Will {does} (in a later version).",
    )


replay = _later(
    "dlq replay",
    "publish dead letters again, with key, headers and attempt count",
    "see them with `megaflow dlq list` and `megaflow dlq show`",
)
simulate = _later("simulate", "simulate a schedule of stages on machines", "measure one with `megaflow run --json`")
inspect = _later("inspect", "show a record decoded", "see records with `megaflow status tail TOPIC`")
dropped = _later(
    "dropped",
    "list conversations that were left out, and why",
    "see them with `megaflow status tail conversations.dropped -o beginning -e`",
)
dashboard = _later("dashboard", "serve a page of live figures", "see them with `megaflow status` and `megaflow lag`")
serve = _later("serve", "serve a promoted checkpoint", "take it out with `megaflow checkpoints export`")
