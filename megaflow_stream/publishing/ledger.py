"""What has been published: the compacted topic `publish.ledger`, one entry a chunk.

An entry is written in the transaction of its chunk's records, so a chunk is published if and only if its entry can be
read. A run reads the ledger up to the log's end, waiting until each transaction with an entry before that end is
decided. So what a killed run has left behind is settled, whichever transactional id it had: it asked for its commit
after its entries were acknowledged; either they are before that end, and are read if it was committed, or it never was.
Initialising the transactional id comes first: it ends at once what a run of the same id left open, and fences that run
if it lives. Two runs of different ids that publish the same content *at the same time* do not see each other.

Most entries are *closed*: the chunk was full and all its documents were good, so the same place of the same file can
only give the same chunk again. An *open* entry (a short chunk, or one with rejects) lists its documents' hashes, so
that its later version, a chunk that holds all of its documents and more, publishes only the others.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from megaflow_stream.bus.api import Bus, Record
from megaflow_stream.errors import BusError

TOPIC = "publish.ledger"
HASH_BYTES = 8  # of the 16 of a document's hash: within the one chunk that they are compared to it is enough
# An open transaction of another publisher ends at the latest when the broker times it out (20 s, found within 10).
_PATIENCE_SECONDS = 60.0
_SAID_SECONDS = 3.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A published chunk. `hashes` of its good documents are kept where the entry is open."""

    documents: int
    rejected: int
    hashes: tuple[bytes, ...] = ()


class Ledger:
    """The entries of one topic and dataset by key, and the open ones by the hash of their first document."""

    def __init__(self, topic: str, dataset: str) -> None:
        self.topic, self.dataset = topic, dataset
        self.entries: dict[bytes, Entry] = {}
        self.written: dict[bytes, bytes] = {}  # the newest entries as they lie on the topic
        self._open: dict[bytes, list[tuple[bytes, ...]]] = {}

    def add(self, key: bytes, entry: Entry) -> None:
        self.entries[key] = entry
        if entry.hashes:
            self._open.setdefault(entry.hashes[0], []).append(entry.hashes)

    def remaining(self, hashes: Sequence[bytes]) -> Counter[bytes]:
        """What of a chunk's documents is not in its largest earlier version; all, where it has none."""
        here = Counter(hashes)
        best: tuple[bytes, ...] = ()
        if self._open:
            for first in here:
                for candidate in self._open.get(first, ()):
                    if len(candidate) > len(best) and Counter(candidate) <= here:
                        best = candidate
        return here - Counter(best)

    def read_entry(self, record: Record) -> None:
        """Takes an entry off the log. Entries of other topics and datasets, and what is no entry, are left alone."""
        if record.key is None or record.value is None:
            return
        try:
            value = orjson.loads(record.value)
            if (value["topic"], value["dataset"]) != (self.topic, self.dataset):
                return
            packed = base64.b64decode(value.get("hashes", ""))
            hashes = tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))
            entry = Entry(documents=value["documents"], rejected=value["rejected"], hashes=hashes)
        except (ValueError, KeyError, AttributeError, TypeError):
            return
        self.add(record.key, entry)
        self.written[record.key] = record.value


def entry_json(entry: Entry, *, topic: str, dataset: str, producer: str, file: str, at_ms: int) -> bytes:
    """An entry's value on the topic: for people too, so it says whose chunk it is."""
    value = {
        "topic": topic,
        "dataset": dataset,
        "producer": producer,
        "file": file,
        "documents": entry.documents,
        "rejected": entry.rejected,
        "at_ms": at_ms,
    }
    if entry.hashes:
        value["hashes"] = base64.b64encode(b"".join(entry.hashes)).decode()
    return orjson.dumps(value)


async def read(bus: Bus, topic: str, dataset: str) -> Ledger:
    """What has been published of a dataset to a topic, each transaction that was open when this began ended.

    Raises `NotFound` where the topic is not there, `BusError` where a transaction stays open.
    """
    ledger = Ledger(topic, dataset)
    partitions = await bus.partitions(TOPIC)
    ends = await bus.end_offsets(partitions, isolation="read_uncommitted")
    begins = await bus.begin_offsets(partitions)
    wanted = {p: ends[p] for p in partitions if ends[p] > begins[p]}
    if not wanted:
        return ledger
    reader = await bus.reader()
    loop = asyncio.get_running_loop()
    words = "another publisher is in a transaction, or has left one open: waiting for its end, for %g s at most"
    said = loop.call_later(_SAID_SECONDS, log.warning, words, _PATIENCE_SECONDS)
    try:
        reader.assign({p: begins[p] for p in wanted})
        async with asyncio.timeout(None) as patience:
            reached: dict[object, int] = {}
            while wanted:
                for records in (await reader.fetch()).values():
                    for record in records:
                        ledger.read_entry(record)
                positions = {p: await reader.position(p) for p in wanted}
                if positions != reached:
                    reached = dict(positions)
                    patience.reschedule(loop.time() + _PATIENCE_SECONDS)
                    said.cancel()
                    said = loop.call_later(_SAID_SECONDS, log.warning, words, _PATIENCE_SECONDS)
                wanted = {p: end for p, end in wanted.items() if positions[p] < end}
    except TimeoutError as error:
        raise BusError(
            "reading what has been published: a transaction stays open",
            retriable=True,
            hint="another publisher may be stopped in the middle: end it, or wait until the broker times it out",
            topic=TOPIC,
        ) from error
    finally:
        said.cancel()
        await reader.close()
    return ledger
