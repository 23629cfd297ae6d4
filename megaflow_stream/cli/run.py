"""`megaflow run`: the main job."""

from __future__ import annotations

import asyncio

import click

from megaflow_stream.cli.context import Context, command_options, say


@click.command()
@click.option("--until-idle", is_flag=True, help="End when everything published has been trained and evaluated.")
@click.option("--input", "inputs", multiple=True, metavar="PATH", help="Publish these files instead of the samples.")
@click.option("--dry-run", is_flag=True, help="Check every definition, say what would be started, start nothing.")
@command_options
def run(context: Context, until_idle: bool, inputs: tuple[str, ...], dry_run: bool) -> int:
    """Run the whole pipeline: services, topics, input, workers, trainers, evaluators. Ctrl-C stops it in order.

    \b
    Example:
      megaflow run --until-idle
      megaflow run --until-idle --input conversations.jsonl --json
    """
    from megaflow_stream.runtime.report import choose
    from megaflow_stream.runtime.run import Run, plan
    from megaflow_stream.runtime.signals import stop_event
    from megaflow_stream.runtime.summary import loss_plot, text

    made = plan(context.project, context.settings, inputs, until_idle=until_idle)
    if dry_run:
        for note in made.notes:
            say(f"note: {note}")
        for stage, workers in made.workers.items():
            click.echo(f"{stage}: {workers} workers of {', '.join(p.name for p in made.processors)}")
        for trainer in made.trainers:
            click.echo(f"{trainer.name}: {made.ranks[trainer.name] or 'as many ranks as the machine allows'}")
        for evaluation in made.evaluations:
            click.echo(f"{evaluation.name}: evaluates {evaluation.trainer}")
        click.echo(f"input: {', '.join(made.sources) or 'none'}")
        return 0
    report = choose(context.json)

    async def go() -> int:
        stop = stop_event(exit_seconds=60.0)
        running = Run(made, report, stop)
        try:
            result = await running.run()
        finally:
            report.close()
            report.event("summary", **running.summary.to_json())  # the last event, of a run that failed too
        if not context.json:
            if plot := loss_plot(result.run_folder):
                click.echo(plot + "\n")
            click.echo(text(result))
        return 130 if stop.is_set() else 0

    return asyncio.run(go())
