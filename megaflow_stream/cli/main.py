"""`megaflow`: the commands there are, and what becomes of an error.

A command's module is imported when the command is called, not before: `megaflow --help` imports neither torch nor
aiokafka nor pyarrow.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import click

from megaflow_stream import __version__
from megaflow_stream.config.values import suggestion
from megaflow_stream.errors import MegaflowError


class Entry(NamedTuple):
    """Where a command is, and its line in the help: so the help needs no import."""

    target: str
    line: str


COMMANDS = {
    "init": Entry("megaflow_stream.cli.init:init", "Make a new project: the reference pipeline as a scaffold."),
    "run": Entry("megaflow_stream.cli.run:run", "Run the whole pipeline: services, topics, workers, trainers."),
    "services": Entry("megaflow_stream.cli.services:services", "Embedded Kafka and S3: up, down, status."),
    "topics": Entry("megaflow_stream.cli.topics:topics", "Declared topics against the cluster: apply, diff, list."),
    "publish": Entry("megaflow_stream.cli.publish:publish", "Publish conversations from files, folders or stdin."),
    "process": Entry("megaflow_stream.cli.process:process", "Run workers of processors."),
    "train": Entry("megaflow_stream.cli.train:train", "Run one node of a trainer group."),
    "evaluate": Entry("megaflow_stream.cli.evaluate:evaluate", "Evaluate the checkpoints of a trainer."),
    "status": Entry("megaflow_stream.cli.status:status", "One line a component; `status tail` follows a topic."),
    "lag": Entry("megaflow_stream.cli.lag:lag", "How far each group is behind on each partition."),
    "checkpoints": Entry(
        "megaflow_stream.cli.checkpoints:checkpoints", "Checkpoints: list, show, verify, prune, export."
    ),
    "lineage": Entry(
        "megaflow_stream.cli.lineage:lineage", "What a checkpoint was trained on, where a conversation went."
    ),
    "dlq": Entry("megaflow_stream.cli.dlq:dlq", "The dead-letter topic: list, show, replay."),
    "config": Entry("megaflow_stream.cli.config:config", "Settings, each with where its value came from."),
    "tokenizer": Entry("megaflow_stream.cli.tokenizer:tokenizer", "Train and show the project's tokenizer."),
}
# They exist, say that a later version brings them, and exit 2.
LATER = {
    "simulate": Entry("megaflow_stream.cli.later:simulate", "Simulate a schedule (in a later version)."),
    "inspect": Entry("megaflow_stream.cli.later:inspect", "Look into a record (in a later version)."),
    "dropped": Entry("megaflow_stream.cli.later:dropped", "Conversations left out, and why (in a later version)."),
    "dashboard": Entry("megaflow_stream.cli.later:dashboard", "Serve the dashboard (in a later version)."),
    "serve": Entry("megaflow_stream.cli.later:serve", "Serve a promoted checkpoint (in a later version)."),
}


class LazyGroup(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *LATER]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name) or LATER.get(cmd_name)
        if entry is None:
            return None
        module, attribute = entry.target.split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if cmd_name == "dlq" and isinstance(command, click.Group) and "replay" not in command.commands:
            from megaflow_stream.cli.later import replay

            command.add_command(replay)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in COMMANDS and name not in LATER:
            ctx.fail(f"There is no command {name!r}: {suggestion(name, COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.line) for name, entry in COMMANDS.items()])
        with formatter.section("In a later version"):
            formatter.write_dl(
                [(name, entry.line.removesuffix(" (in a later version).") + ".") for name, entry in LATER.items()]
            )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="megaflow")
@click.option("--project", "project_dir", type=click.Path(path_type=Path), help="The project's folder, of any command.")
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
def cli(project_dir: Path | None, debug: bool) -> None:
    """Agent conversations in, evaluated checkpoints out, every record counted once.

    \b
    Example:
      megaflow init demo && cd demo
      megaflow run --until-idle
    """


def main(args: list[str] | None = None) -> None:
    """The program. Exit codes: 0 done, 1 failed, 2 wrong use or settings, 3 a service unreachable, 130 interrupted.

    A command returns None, or its exit code.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run(args))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM is Ctrl-C by another name, so that services started for this command alone end with it. Commands that
    have an end of their own (`runtime.signals`) replace this."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # a shell's background job ignores Ctrl-C
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


def run(args: list[str] | None = None) -> int:
    """Runs one command in this process; its exit code."""
    arguments = sys.argv[1:] if args is None else args
    try:
        code = cli.main(args=arguments, prog_name="megaflow", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) and not isinstance(code, bool) else 0
    except click.exceptions.Exit as exit:
        return exit.exit_code
    except SystemExit as exit:  # click's own way out when the reader of stdout is gone
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        return _quiet()
    except BaseExceptionGroup as group:
        return _report(_cause(group), arguments)
    except Exception as error:
        return _report(error, arguments)


def _quiet() -> int:
    """The reader of stdout is gone: say nothing, also not when Python flushes stdout at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _cause(error: BaseException) -> BaseException:
    """The one to report of a group: an error of ours before a bug, a bug before an interrupt."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_cause(inner) for inner in error.exceptions]
    ours = [cause for cause in causes if isinstance(cause, MegaflowError)]
    bugs = [cause for cause in causes if isinstance(cause, Exception)]
    return (ours or bugs or causes)[0]


def _report(error: BaseException, arguments: list[str]) -> int:
    if isinstance(error, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    debug = "--debug" in arguments
    if debug:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    if isinstance(error, MegaflowError):
        if error.hint:  # first: the cause is the last line, where whoever reads a log looks for it
            click.echo(f"what to do: {error.hint}", err=True)
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    if not debug:
        click.echo("what to do: run it again with --debug, and report what that shows", err=True)
    click.echo(f"error: unexpected {type(error).__name__}: {error}", err=True)
    return 1


if __name__ == "__main__":
    main()
