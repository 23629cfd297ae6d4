"""Documents of files: paths, folders, globs and standard input, in an order that is the same every time.

What a file holds (JSON, JSON Lines, Parquet, plain or compressed) is told by its content, never by its name. A folder
is read with all that is below it, in the order of the names. Hidden files are left alone; so are, given as `Passed`, a
file of a folder that holds no JSON at all (a licence, a picture), a link to another folder or to nothing, and a pipe.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
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
    """An entry of a folder that was left alone, and why."""

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
    """One file. `path` is None for standard input; `in_folder` when nobody named this very file; `instead` is all that
    is given of one that is not opened."""

    name: str
    path: Path | None
    in_folder: bool = False
    size_bytes: int = 0
    instead: Passed | BadInput | None = None


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

    def unreadable(error: OSError) -> None:
        bad = BadInput(0, f"the folder cannot be read: {error.strerror}", b"")
        found.append(Source(name=str(error.filename), path=Path(error.filename), in_folder=True, instead=bad))

    for folder, folders, names in os.walk(path, onerror=unreadable):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [_entry(Path(folder, name)) for name in sorted([*names, *links]) if not name.startswith(".")]
    return found


def _entry(path: Path) -> Source:
    """An entry of a folder that is no folder itself."""
    size_bytes, instead = 0, None
    try:
        status = path.stat()
        size_bytes = status.st_size
        if stat.S_ISDIR(status.st_mode):
            instead = Passed("a link to a folder is not followed: name it to have it read")
        elif not stat.S_ISREG(status.st_mode):
            instead = Passed("neither a file nor a folder")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            instead = Passed("a link that leads nowhere")
        # anything else is said by who opens it
    return Source(name=str(path), path=path, in_folder=True, size_bytes=0 if instead else size_bytes, instead=instead)


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
    if source.instead is not None:
        yield source.instead
        return
    try:
        if source.path is not None:
            with open(source.path, "rb") as stream:
                yield from _read(stream, source, consumed)
        elif stdin is not None:
            yield from _read(stdin, source, consumed)
        else:
            with _standard_input() as stream:
                yield from _read(stream, source, consumed)
    except OSError as error:
        yield BadInput(0, f"the file cannot be read: {error.strerror or error}", b"")


def _standard_input() -> BinaryIO:
    """Without a buffer: `sys.stdin.buffer` is locked while a thread waits in its `read`, and Python aborts when it ends
    meanwhile and cannot have that lock."""
    if sys.stdin is None:  # file 0 may be anything by now
        raise OSError(errno.EBADF, "standard input is closed")
    return open(0, "rb", buffering=0, closefd=False)


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
