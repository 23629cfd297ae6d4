"""`megaflow tokenizer`: train the project's tokenizer once, before anything is streamed, and say which one it is."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megaflow_stream.cli.context import Context, command_options, print_json, say
from megaflow_stream.conversations import files
from megaflow_stream.conversations.files import Document
from megaflow_stream.errors import BadRecord, UsageError
from megaflow_stream.features.render import texts
from megaflow_stream.features.tokenizer import Tokenizer, train
from megaflow_stream.processing.steps.normalise import Unwanted, normalise
from megaflow_stream.processing.steps.redact import redact

FILE = Path("processors", "tokenizer.json")


@click.group(name="tokenizer")
def tokenizer() -> None:
    """Train and show the project's tokenizer.

    \b
    Example:
      megaflow tokenizer show
    """


@tokenizer.command(name="train")
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the tokenizer goes.  [default: processors/tokenizer.json of the project]",
)
@click.option("--vocab-size", type=click.IntRange(266, 1 << 20), default=4096, show_default=True)
@click.option("--format", "dialect", default="auto", show_default=True, help="The dialect of the conversations.")
@command_options
def train_(context: Context, inputs: tuple[str, ...], output: Path | None, vocab_size: int, dialect: str) -> None:
    """Train a byte-level BPE tokenizer on conversations: files, folders, globs, or - for standard input.

    It learns what a worker will see: conversations in canonical form, personal data masked, each text once. The same
    input gives the same file. Features made with another tokenizer are refused by a trainer: train once, before the
    first run.

    \b
    Example:
      megaflow tokenizer train topics/samples --vocab-size 4096
    """
    path = output or context.project.root / FILE
    seen = Seen()
    with _progress(sum(source.size_bytes for source in files.sources(inputs))) as advance:
        data = train(_texts(inputs, dialect, seen, advance), vocab_size)
    if not seen.conversations:
        raise UsageError(
            f"there is no conversation to train on: {seen.skipped} documents were skipped",
            hint="`megaflow publish --dry-run` says what is wrong with each" if seen.skipped else "name another INPUT",
        )
    trained = Tokenizer(data, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, data)
    report = {
        "tokenizer": path,
        "hash": trained.hash,
        "vocab_size": trained.size,
        "bytes": len(data),
        "conversations": seen.conversations,
        "skipped": seen.skipped,
        "texts": len(seen.texts),
        "characters": seen.characters,
    }
    if context.json:
        print_json(report)
    say(
        f"trained {trained.size} tokens on {seen.characters:,} characters of {seen.conversations} conversations "
        f"({seen.skipped} skipped) into {path}, {len(data):,} bytes, {trained.hash[:12]}"
    )


@tokenizer.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), required=False)
@command_options
def show(context: Context, path: Path | None) -> None:
    """Show a tokenizer: its hash, as in the header `tokenizer` of feature records, and its size.

    \b
    Example:
      megaflow tokenizer show --json | jq -r .hash
    """
    path = path or context.project.root / FILE
    loaded = Tokenizer.load(path)
    report = {
        "tokenizer": path,
        "hash": loaded.hash,
        "vocab_size": loaded.size,
        "bytes": path.stat().st_size,
        "control_tokens": loaded.control,
    }
    if context.json:
        print_json(report)
        return
    for name, value in report.items():
        click.echo(f"{name:15}{' '.join(value) if isinstance(value, dict) else value}")


@dataclass
class Seen:
    """What was read. texts: digests, so that a system prompt of a thousand conversations counts once."""

    conversations: int = 0
    skipped: int = 0
    characters: int = 0
    texts: set[bytes] = field(default_factory=set)


def _texts(inputs: tuple[str, ...], dialect: str, seen: Seen, advance: _Advance) -> Iterator[str]:
    for source in files.sources(inputs):
        for item in files.read(source, consumed=advance):
            if isinstance(item, files.Passed):
                continue
            if not isinstance(item, Document):
                seen.skipped += 1
                continue
            try:
                conversation, _ = redact(normalise(item.raw, key=None, format=dialect))
            except (BadRecord, Unwanted):
                seen.skipped += 1
                continue
            seen.conversations += 1
            for text in texts(conversation):
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if digest not in seen.texts:
                    seen.texts.add(digest)
                    seen.characters += len(text)
                    yield text


class _Advance:
    """Takes the number of bytes read."""

    def __init__(self, progress: Progress, size_bytes: int) -> None:
        self.progress = progress
        self.task = progress.add_task("reading conversations", total=size_bytes or None)

    def __call__(self, size_bytes: int) -> None:
        self.progress.advance(self.task, size_bytes)


@contextmanager
def _progress(size_bytes: int) -> Iterator[_Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield _Advance(progress, size_bytes)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: a worker may load the file at any time."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
