"""`megaflow config`: the settings, and where each came from."""

from __future__ import annotations

import click

from megaflow_stream.cli.context import Context, command_options, print_json, print_table, say
from megaflow_stream.config.shown import shown
from megaflow_stream.definitions.pipeline import warnings
from megaflow_stream.project.machine import this_machine
from megaflow_stream.project.stages_shown import stages_shown


@click.group()
def config() -> None:
    """Settings, each with where its value came from.

    \b
    Example:
      megaflow config show
    """


@config.command()
@command_options
def show(context: Context) -> None:
    """Every setting, its value and its origin: default, file and line, variable or flag. Secrets are masked.

    Then what the stages of the pipeline say; what they ask for beyond what this machine has is a warning.

    \b
    Example:
      MEGAFLOW_LOG_LEVEL=debug megaflow config show --json | jq '.log_level.origin'
    """
    lines = shown(context.settings, context.origins) + stages_shown(context.project)
    if context.json:
        print_json({line.name: {"value": line.value, "origin": line.origin, "doc": line.doc} for line in lines})
    else:
        print_table(
            ("setting", "value", "origin", "what it is"),
            [(line.name, line.text, line.origin, line.doc) for line in lines],
        )
    for warning in warnings(context.project.pipeline(), this_machine()):
        say(f"warning: {warning}")
