"""`megaflow evaluate`: one evaluator, in the foreground."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from megaflow_stream.cli.context import Context, command_options, say

if TYPE_CHECKING:
    from megaflow_stream.definitions.trainer import Evaluation, Trainer


@click.command()
@click.argument("name")
@click.option("--component", hidden=True, help="The evaluator's name in status; one of its own by default.")
@command_options
def evaluate(context: Context, name: str, component: str | None) -> int:
    """Evaluate each checkpoint of the trainer that the evaluation NAME follows, and promote the best.

    Results go to the topic `evaluations`; the best is the alias `best` of `megaflow checkpoints list`. Runs until
    SIGTERM or Ctrl-C. A second evaluator of the same NAME takes over from the first.

    \b
    Example:
      megaflow evaluate evaluation
    """
    _, evaluation = context.project.evaluation(name)
    _, trainer = context.project.trainer(evaluation.trainer)
    say(f"evaluating the checkpoints of {trainer.name} on {trainer.validation}")
    return asyncio.run(_evaluate(context, evaluation, trainer, component or f"evaluator/{name}"))


async def _evaluate(context: Context, evaluation: Evaluation, trainer: Trainer, component: str) -> int:
    from megaflow_stream.evaluation import Evaluator
    from megaflow_stream.observe.status import StatusWriter
    from megaflow_stream.runtime.connection import connected
    from megaflow_stream.runtime.signals import stop_event

    stop = stop_event()
    async with (
        connected(context.project, context.settings) as connection,
        StatusWriter(connection.bus, component, "evaluator") as status,
    ):
        await Evaluator(connection.bus, connection.store, evaluation, trainer, status=status).run(stop)
    return 0
