"""JSON texts out of blocks of bytes: JSON Lines, one object, an array, or several of them, told by content.

Documents keep their bytes: a line is passed on as it is, an object that spans lines loses only the white space between
its tokens. Memory holds a block and a document, whatever the size of the file.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import orjson

from megaflow_stream.errors import BadRecord

SNIFF_BYTES = 1 << 16
DOCUMENT_BYTES = 1 << 26  # 64 MiB: no topic takes a record of this size
_KEPT_BYTES = 1 << 16  # of what is too broken to be told apart
_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_SPACE_OUTSIDE_STRINGS = re.compile(rb'("(?:[^"\\]|\\.)*")|[ \t\r\n]+', re.DOTALL)
_GAP = re.compile(r"[ \t\r\n]*")

Kind = Literal["lines", "values", "other", "empty"]


class Text(NamedTuple):
    """What should be one JSON object. `line` is its first line, from 1; `raw` its bytes; `element` its number in an
    array. `decode(raw)` tells whether it is one."""

    line: int
    raw: bytes
    element: int | None = None


class BadInput(NamedTuple):
    """Something that cannot be read, and why."""

    line: int
    reason: str
    raw: bytes
    element: int | None = None


def decode(raw: bytes) -> dict[str, Any]:
    """The object of a JSON text. Raises `BadRecord` for anything else."""
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRecord(f"a conversation is a JSON object, this is {_named(document)}")
    return document


def _named(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def kind(head: bytes, whole: bool) -> Kind:
    """What the first bytes of a text show. `whole`: there are no others."""
    text = head.lstrip(_SPACE)
    if not text:
        return "empty"
    if text[:1] == b"[":
        return "values"
    lines = text.split(b"\n")
    complete = lines if whole else lines[:-1]
    if text[:1] == b"{":
        if len(lines) == 1 or _is_object(complete[0]):
            return "lines"
        if any(_is_object(line) for line in complete[1:]):
            return "lines"
        try:
            json.JSONDecoder().raw_decode(text.decode("latin-1"))
        except json.JSONDecodeError as error:
            # Broken inside the first line: a bad line. Broken later, or cut off by the end of what is seen: a value.
            return "lines" if error.pos < len(lines[0]) else "values"
        except (ValueError, RecursionError):
            return "values"
        return "values"
    return "lines" if any(_is_object(line) for line in complete) else "other"


def _is_object(line: bytes) -> bool:
    if line[:1] != b"{":
        return False
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def texts(blocks: Iterator[bytes]) -> Iterator[Text | BadInput]:
    """Every document's text. Raises `BadRecord` where it holds no JSON at all, or its bytes cannot be had."""
    head = b""
    for block in blocks:
        head += block
        if len(head) >= SNIFF_BYTES:
            break
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadRecord("the text is UTF-16: JSON is read as UTF-8")
    head = head.removeprefix(_BOM)
    found = kind(head[:SNIFF_BYTES], len(head) <= SNIFF_BYTES)
    if found == "other":
        raise BadRecord("neither JSON, JSON Lines nor Parquet (after gzip or zstd)")
    rest = itertools.chain([head], blocks)
    if found == "lines":
        yield from _lines(rest)
    elif found == "values":
        yield from _values(rest)


def _lines(blocks: Iterator[bytes]) -> Iterator[Text | BadInput]:
    number = 0
    pieces: list[bytes] = []  # of a line that goes on in the next block
    size = 0
    for block in itertools.chain(blocks, [b"\n"]):
        first, *others = block.split(b"\n")
        if size <= DOCUMENT_BYTES:
            pieces.append(first)
        size += len(first)
        if not others:
            continue
        lines = [b"".join(pieces), *others]
        too_long = size > DOCUMENT_BYTES
        pieces, size = [lines.pop()], len(others[-1])
        for line in lines:
            number += 1
            if too_long:
                too_long = False
                yield BadInput(number, f"a line of more than {DOCUMENT_BYTES >> 20} MiB", line[:_KEPT_BYTES])
                continue
            if line := line.strip(_SPACE):
                yield Text(number, line)


def _values(blocks: Iterator[bytes]) -> Iterator[Text | BadInput]:
    """Values one after another, arrays at the top level opened. The text is scanned as Latin-1, one character a
    byte: JSON's own characters are ASCII, and positions stay those of the bytes."""
    decoder = json.JSONDecoder()
    text, at, line = "", 0, 1
    inside, separated, ended = False, True, False
    element = 0  # of the array that is open, from 1

    def more() -> bool:
        """At least doubles what is not yet used, so that a long value is not scanned again and again."""
        nonlocal text, at, ended
        pieces = [text[at:]]
        wanted, got = len(pieces[0]), 0
        while got <= wanted and not ended:
            block = next(blocks, None)
            if block is None:
                ended = True
            else:
                pieces.append(block.decode("latin-1"))
                got += len(block)
        text, at = "".join(pieces), 0
        return got > 0

    def bad(reason: str) -> BadInput:
        where = "the array" if inside else "the text"
        raw = text[at : at + _KEPT_BYTES].encode("latin-1")
        return BadInput(line, f"{reason}; the rest of {where} is not read", raw)

    while True:
        end = _GAP.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", at, end)
        at = end
        if at == len(text):
            if more():
                continue
            if inside:
                yield bad("not JSON: the array has no end")
            return
        mark = text[at]
        if mark == "[" and not inside:
            inside, separated, element, at = True, True, 0, at + 1
            continue
        if inside and mark == "]":
            inside, at = False, at + 1
            continue
        if inside and mark == "," and not separated:
            separated, at = True, at + 1
            continue
        if inside and not separated:
            yield bad("not JSON: a comma or the array's end is missing")
            return
        try:
            _, end = decoder.raw_decode(text, at)
            if end == len(text) and mark not in '{["' and more():
                continue  # a number may go on
        except json.JSONDecodeError as error:
            cut = error.pos + 16 > len(text) or error.msg.startswith("Unterminated string")
            if cut and len(text) - at < DOCUMENT_BYTES and more():
                continue
            number = line + text.count("\n", at, error.pos)
            yield bad(f"not JSON: {error.msg} on line {number}")
            return
        except (ValueError, RecursionError) as error:
            yield bad(f"not JSON: {error}")
            return
        raw = text[at:end].encode("latin-1")
        element += inside
        if b"\n" in raw:
            raw = _SPACE_OUTSIDE_STRINGS.sub(rb"\1", raw)
        yield Text(line, raw, element if inside else None)
        line += text.count("\n", at, end)
        at, separated = end, not inside
