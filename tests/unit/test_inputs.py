"""What of the named inputs is read, and what is said of the rest: nothing is skipped in silence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaflow_stream.conversations import bytestream
from megaflow_stream.conversations.files import BadInput, Document, Passed, Source, read, sources

ONE = b'{"n":1}\n'
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter too."""
    made = Path(tempfile.mkdtemp(prefix="megaflow-inputs-"))
    made.chmod(0o755)
    yield made
    for below in made.iterdir():
        if below.is_dir() and not below.is_symlink():
            below.chmod(0o755)
    shutil.rmtree(made)


@contextmanager
def an_ordinary_user() -> Iterator[None]:
    """Permissions do not hold for root."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


def said(found: list[Source]) -> dict[str, str]:
    """What each source that gives no document says, by the last part of its name."""
    words = {}
    for source in found:
        for item in read(source):
            if not isinstance(item, Document):
                words[Path(source.name).name] = f"{type(item).__name__}: {item.reason}"
    return words


def documents(found: list[Source]) -> list[str]:
    return [Path(s.name).name for s in found for item in read(s) if isinstance(item, Document)]


def test_links_in_a_folder_are_followed_to_files_and_said_otherwise(folder: Path) -> None:
    (folder / "in").mkdir()
    (folder / "out").mkdir()
    (folder / "out" / "a.json").write_bytes(ONE)
    (folder / "in" / "b.json").symlink_to(folder / "out" / "a.json")
    (folder / "in" / "linked").symlink_to(folder / "out")
    (folder / "in" / "dangling").symlink_to(folder / "nothing")
    (folder / "in" / "round").symlink_to("round")
    (folder / "in" / ".hidden").symlink_to(folder / "out")
    os.mkfifo(folder / "in" / "pipe")
    found = sources([folder / "in"])
    assert documents(found) == ["b.json"]
    assert said(found) == {
        "linked": "Passed: a link to a folder is not followed: name it to have it read",
        "dangling": "Passed: a link that leads nowhere",
        "round": "Passed: a link that leads nowhere",
        "pipe": "Passed: neither a file nor a folder",
    }
    assert [Path(s.name).name for s in found] == sorted(["b.json", "linked", "dangling", "round", "pipe"])
    assert documents(sources([folder / "in" / "linked"])) == ["a.json"], "named, a link is read"


@pytest.mark.parametrize("mode", [0o000, 0o444], ids=["not listed", "not entered"])
def test_an_unreadable_folder_is_a_bad_input(folder: Path, mode: int) -> None:
    (folder / "a.json").write_bytes(ONE)
    locked = folder / "locked"
    locked.mkdir()
    (locked / "b.json").write_bytes(ONE)
    locked.chmod(mode)
    with an_ordinary_user():
        for named in (folder, locked):
            found = sources([named])
            (word,) = said(found).values()
            assert re.fullmatch("BadInput: the (file|folder) cannot be read: Permission denied", word)
        assert documents(sources([folder])) == ["a.json"]
    locked.chmod(0o755)


def test_a_file_that_may_not_be_read_is_a_bad_input(folder: Path) -> None:
    (folder / "a.json").write_bytes(ONE)
    (folder / "a.json").chmod(0)
    with an_ordinary_user():
        assert said(sources([folder])) == {"a.json": "BadInput: the file cannot be read: Permission denied"}


def test_a_pipe_that_does_not_block_is_read_to_its_end() -> None:
    """Another program may have set the shared pipe so: a read that finds nothing yet is not the end."""
    out, into = os.pipe()
    os.set_blocking(out, False)
    code = f"import os, sys; sys.stdin.read(1); os.write({into}, {ONE!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[into]) as writer:
        os.close(into)
        with open(out, "rb", buffering=0) as stream:
            assert stream.read(1) is None
            assert writer.stdin is not None
            writer.stdin.write(b"x")
            writer.stdin.flush()
            assert b"".join(bytestream.blocks(stream)) == ONE


def test_standard_input_that_is_closed_is_a_bad_input() -> None:
    code = "from megaflow_stream.conversations.files import *\nprint(*read(sources('-')[0]))"
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" <&-', sys.executable, code], capture_output=True, text=True)
    assert (done.returncode, "standard input is closed" in done.stdout) == (0, True), done.stderr


def test_what_is_said_in_place_of_documents_is_a_passed_or_a_bad_input() -> None:
    for item in (Passed("why"), BadInput(0, "why", b"")):
        assert list(read(Source(name="x", path=Path("/x"), instead=item))) == [item]
