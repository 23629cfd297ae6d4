"""`megaflow train`: one node of a trainer group, in the foreground."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import click

from megaflow_stream.cli.context import Context, command_options, print_json, say

if TYPE_CHECKING:
    from collections.abc import Mapping

EVERY_SECONDS = 2.0  # between the lines that tell a person of steps


@click.command()
@click.argument("name")
@click.option(
    "--nproc-per-node",
    "ranks",
    type=click.IntRange(1, 1024),
    help="Ranks on this node.  [default: one a GPU; without any, two]",
)
@click.option("--until-step", type=click.IntRange(min=0), help="End after this step, with a checkpoint.")
@click.option(
    "--replay",
    is_flag=True,
    help="Train the logged plan from its beginning again, as the job NAME.replay: nothing is written to Kafka.",
)
@command_options
def train(context: Context, name: str, ranks: int | None, until_step: int | None, replay: bool) -> int | None:
    """Train the trainer NAME: its ranks on this node, restarted from the last checkpoint when one is lost.

    Runs until SIGTERM or Ctrl-C, which finish the step and store a last checkpoint; --replay ends with its plan, and
    with the SHA-256 of the weights. A restart may use another number of ranks: it trains the same to the bit.

    \b
    Example:
      megaflow train model_finetune --nproc-per-node 2
      megaflow train model_finetune --replay --until-step 50
    """
    return asyncio.run(_train(context, name, ranks, until_step, replay))


async def _train(context: Context, name: str, ranks: int | None, until_step: int | None, replay: bool) -> int | None:
    from megaflow_stream.runtime.connection import located
    from megaflow_stream.runtime.signals import stop_event
    from megaflow_stream.training.job import Job, S3Address
    from megaflow_stream.training.launcher import Launcher, default_ranks

    stop = stop_event()
    path, trainer = context.project.trainer(name)
    async with located(context.project, context.settings) as services:
        job = Job(
            name=name,
            definition=path,
            root=context.project.root,
            bootstrap_servers=services.bootstrap_servers,
            security=services.security,
            s3=S3Address(
                endpoint_url=services.endpoint_url,
                bucket=context.settings.s3.bucket,
                access_key=services.access_key,
                secret_key=services.secret_key,
                region=services.region,
            ),
            replay=replay,
            until_step=until_step,
            checkpoint=next((s.checkpoint for s in context.project.pipeline().stages if s.name == path.stem), None),
            gates=context.project.gates(name),
        )
        job.trainer()  # a wrong one is refused here, before any rank starts
        told = print_json if context.json else _Told()
        launcher = Launcher(job, trainer, ranks or default_ranks(), on_event=told)
        asked = asyncio.create_task(_ask(stop, launcher))
        try:
            await launcher.run()
        finally:
            asked.cancel()
    return None


async def _ask(stop: asyncio.Event, launcher: Any) -> None:
    await stop.wait()
    launcher.stop()


class _Told:
    """Events as lines for a person, on stderr; steps not more often than one reads."""

    def __init__(self) -> None:
        self._at = -1e9

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            if time.monotonic() - self._at < EVERY_SECONDS:
                return
            self._at = time.monotonic()
            loss = "none trained" if event["loss"] is None else f"{event['loss']:.4f}"
            rate, records = f"{event['tokens_per_second']:,} tokens/s", f"{event['records']:,} records"
            say(f"step {event['step']}  loss {loss}  {rate}  {records}")
        elif kind == "started":
            ranks = event["world_size"]
            say(f"training from step {event['step']} with {ranks} rank{'s' if ranks > 1 else ''}")
        elif kind == "waiting":
            say(f"waiting for {event['waiting_for']}")
        elif kind == "checkpoint":
            say(f"checkpoint of step {event['step']}: {event['manifest']}")
        elif kind == "drained":
            say(f"trained to the end of the bounded input, at step {event['step']}")
        elif kind == "stopped":
            say(f"stopped after step {event['step']}; weights {event['weights_sha256']}")
