"""Documents of files: paths, folders, globs and standard input, in an order that is the same every time.

What a file holds (JSON, JSON Lines, Parquet, plain or compressed) is told by its content, never by its name. A folder
is read with all that is below it, in the order of the names; hidden files are left alone, and so is a file in a folder
that holds no JSON at all (a licence, a picture): that one is given as `Passed`.
"""

from __future__ import annotations

import glob
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megaflow_stream.conversations import bytestream, jsontext, rows
from megaflow_stream.conversations.jsontext import BadInput, Text, decode
from megaflow_stream.errors import BadRecord, UsageError

STDIN = "-"


class Passed(NamedTuple):
    """A file of a folder that was left alone, and why."""

    reason: str


__all__ = ["BadInput", "Document", "Passed", "Source", "Text", "read", "scan", "sources"]


class Document(NamedTuple):
    """A JSON object of a file: its place, its own bytes, and what they say."""

    line: int
    raw: bytes
    element: int | None
    document: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file. `path` is None for standard input; `in_folder` when nobody named this very file."""

    name: str
    path: Path | None
    in_folder: bool = False
    size_bytes: int = 0


def sources(paths: Sequence[str | Path]) -> list[Source]:
    """The files that paths, folders and globs mean. Raises `UsageError` where one means none."""
    found: list[Source] = []
    for given in map(str, paths):
        if given == STDIN:
            found.append(Source(name="<stdin>", path=None))
        elif os.path.exists(given):
            found += _under(Path(given))
        else:
            matched = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else []
            if not matched:
                raise UsageError(
                    f"there is no file {given}", hint="a PATH is a file, a folder, a glob, or - for standard input"
                )
            for name in matched:
                found += _under(Path(name))
    return found


def _under(path: Path) -> list[Source]:
    if not path.is_dir():
        return [Source(name=str(path), path=path, size_bytes=path.stat().st_size)]
    found: list[Source] = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                found.append(Source(name=str(file), path=file, in_folder=True, size_bytes=file.stat().st_size))
    return found


def read(
    source: Source, stdin: BinaryIO | None = None, consumed: Callable[[int], object] = lambda size: None
) -> Iterator[Document | BadInput | Passed]:
    """Every document of a file, and what is none with its line and the reason; never raises for content."""
    for item in scan(source, consumed, stdin):
        if not isinstance(item, Text):
            yield item
            continue
        try:
            yield Document(*item, decode(item.raw))
        except BadRecord as error:
            yield BadInput(item.line, error.message, item.raw, item.element)


def scan(
    source: Source, consumed: Callable[[int], object] = lambda size: None, stdin: BinaryIO | None = None
) -> Iterator[Text | BadInput | Passed]:
    """The text of every document of a file, not yet decoded: who knows it by its bytes need not.

    consumed: told of each number of bytes taken from the file.
    stdin: what `-` means, the process's own standard input by default.
    """
    try:
        if source.path is None:
            yield from _read(stdin or sys.stdin.buffer, source, consumed)
        else:
            with open(source.path, "rb") as stream:
                yield from _read(stream, source, consumed)
    except OSError as error:
        yield BadInput(0, f"the file cannot be read: {error.strerror or error}", b"")


def _read(stream: BinaryIO, source: Source, consumed: Callable[[int], object]) -> Iterator[Text | BadInput | Passed]:
    line = 0
    try:
        found = bytestream.blocks(stream, consumed)
        first = next(found, b"")
        if first.startswith(rows.MAGIC):
            with tempfile.TemporaryFile() as copy:
                if stream.seekable() and _starts_with(stream, rows.MAGIC):
                    parquet: BinaryIO = stream
                else:  # Parquet is read from its end
                    copy.write(first)
                    for block in found:
                        copy.write(block)
                    copy.seek(0)
                    parquet = copy
                for item in rows.rows(parquet):
                    line = item.line
                    yield item
            return
        for item in jsontext.texts(_chain(first, found)):
            line = item.line
            yield item
    except BadRecord as error:
        if line == 0 and source.in_folder and error.message.startswith("neither JSON"):
            yield Passed(error.message)
        else:
            yield BadInput(line, error.message, b"")


def _starts_with(stream: BinaryIO, magic: bytes) -> bool:
    stream.seek(0)
    starts = stream.read(len(magic)) == magic
    stream.seek(0)
    return starts


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest
