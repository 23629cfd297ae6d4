"""A chunk: the unit in which a publish is done or not done.

The documents of one file are cut by their position, a thousand or 4 MiB at a time, whether they turn out good or bad:
the same file is cut in the same places by every run, and a record that is repaired moves no border.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megaflow_stream.conversations.files import BadInput, Passed, Text

DOCUMENTS = 1000
BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Documents of one file that follow one another.

    file: its name, as rejects show it.
    short: the file ended before the chunk was full: a file that grows changes it.
    """

    file: str
    items: list[Text | BadInput]
    size_bytes: int
    short: bool

    def hashes(self) -> list[bytes]:
        """16 bytes for each item that name its own bytes."""
        blake2b = hashlib.blake2b
        return [blake2b(item.raw, digest_size=16).digest() for item in self.items]


def key_of(hashes: Sequence[bytes], topic: str, dataset: str) -> bytes:
    """16 bytes that name a chunk of these items for a topic and dataset, whatever its file is called."""
    names = f"{topic}\0{dataset}\0".encode()
    return hashlib.blake2b(names + b"".join(hashes), digest_size=16).digest()


def cut(file: str, items: Iterable[Text | BadInput | Passed]) -> Iterator[Chunk | Passed]:
    """The chunks of a file in their order."""
    held: list[Text | BadInput] = []
    size = 0
    for item in items:
        if isinstance(item, Passed):
            yield item
            continue
        held.append(item)
        size += len(item.raw)
        if len(held) >= DOCUMENTS or size >= BYTES:
            yield Chunk(file=file, items=held, size_bytes=size, short=False)
            held, size = [], 0
    if held:
        yield Chunk(file=file, items=held, size_bytes=size, short=True)
