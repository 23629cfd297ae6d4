"""Bytes of a file in blocks, decompressed: gzip and zstd are known by their first bytes, never by a name."""

from __future__ import annotations

import itertools
import select
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import zstandard

from megaflow_stream.errors import BadRecord

BLOCK_BYTES = 1 << 20
# A compressed block may hold a thousand times as much: small blocks keep what is in memory small.
COMPRESSED_BLOCK_BYTES = 1 << 14
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = tuple(bytes([n]) + b"\x2a\x4d\x18" for n in range(0x50, 0x60))
_MAX_NESTING = 2


def blocks(stream: BinaryIO, consumed: Callable[[int], object] = lambda size: None) -> Iterator[bytes]:
    """The decompressed bytes of `stream`, in blocks that are never empty.

    consumed: told the size of each block read from the stream itself, for progress.
    Raises `BadRecord` where compressed data is damaged or ends early.
    """
    found = _plain(stream, consumed)
    for _ in range(_MAX_NESTING):
        head, found = _peeked(found)
        if head.startswith(_GZIP):
            found = _decompressed(found, "gzip", lambda: zlib.decompressobj(wbits=31), zlib.error)
        elif head.startswith((_ZSTD, *_ZSTD_SKIPPABLE)):
            decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
            found = _decompressed(found, "zstd", decompressor.decompressobj, zstandard.ZstdError)
        else:
            break
    return found


def _plain(stream: BinaryIO, consumed: Callable[[int], object]) -> Iterator[bytes]:
    # A pipe that another program has set not to block gives None while it is empty.
    while (block := stream.read(BLOCK_BYTES)) != b"":
        if block is None:
            select.select([stream], [], [])
            continue
        consumed(len(block))
        yield block


def _peeked(found: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, at least four where there are as many, and all blocks, these included."""
    head = b""
    for block in found:
        head += block
        if len(head) >= 4:
            break
    return head, itertools.chain([head] if head else [], found)


def _decompressed(
    found: Iterator[bytes], name: str, make: Callable[[], Any], failure: type[Exception]
) -> Iterator[bytes]:
    """Frame after frame, as `cat a.gz b.gz` makes them; zeros after a frame are padding."""
    frame: Any = None
    for block in found:
        for at in range(0, len(block), COMPRESSED_BLOCK_BYTES):
            piece = block[at : at + COMPRESSED_BLOCK_BYTES]
            while piece:
                if frame is None:
                    piece = piece.lstrip(b"\0")
                    if not piece:
                        break
                    frame = make()
                try:
                    out = frame.decompress(piece)
                except failure as error:
                    raise BadRecord(f"damaged {name} data: {error}") from error
                if out:
                    yield out
                piece = b""
                if frame.eof:
                    piece, frame = frame.unused_data, None
    if frame is not None:
        raise BadRecord(f"the {name} data ends early: the file is incomplete")
