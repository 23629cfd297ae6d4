"""What of the input is new, cut into transactions: no bus, no waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

from megaflow_stream.clock import Clock
from megaflow_stream.conversations.files import Source, Text, scan
from megaflow_stream.conversations.identity import own_id
from megaflow_stream.conversations.jsontext import decode
from megaflow_stream.errors import BadRecord
from megaflow_stream.publishing.chunk import Chunk, cut, key_of
from megaflow_stream.publishing.ledger import HASH_BYTES, Entry, Ledger, entry_json
from megaflow_stream.publishing.outlet import Batch
from megaflow_stream.publishing.record import Prepared, Recorder
from megaflow_stream.publishing.report import Reject, Rejects, Report

# Several chunks a transaction: a commit costs a few round trips, a chunk of short conversations a few milliseconds.
TRANSACTION_BYTES = 8 << 20
MAX_IDS = 2_000_000  # about 300 MB; ids beyond are published like any, only no longer compared

# A document that can be published: the hash of its bytes, its own id, its record.
_Good = tuple[bytes, str | None, Prepared]


class Run:
    """One pass over the input of a publish. It counts into the report what is decided here: what had been published,
    what is refused, which ids come again; what goes out is counted by whoever commits the batches."""

    def __init__(
        self,
        report: Report,
        recorder: Recorder,
        ledger: Ledger,
        refused: Rejects,
        *,
        producer: str,
        again: bool,
        clock: Clock,
    ) -> None:
        self.report, self.recorder, self.ledger, self.refused = report, recorder, ledger, refused
        self.producer, self.again, self.clock = producer, again, clock
        self.batch = Batch()
        self.ids: dict[str, bytes] = {}

    def batches(self, sources: Sequence[Source], stdin: BinaryIO | None = None) -> Iterator[Batch | None]:
        """What is new, a transaction's worth at a time; None after a chunk that did not fill one, for progress."""
        for source in sources:
            for chunk in cut(source.name, scan(source, self._consumed, stdin)):
                if not isinstance(chunk, Chunk):
                    self.report.passed[source.name] = chunk.reason
                    continue
                self._add(chunk)
                if self.batch.size_bytes >= TRANSACTION_BYTES:
                    yield self._full()
                else:
                    yield None
            self.report.files += 1
        self.report.files -= len(self.report.passed)
        yield self._full()

    def _consumed(self, size: int) -> None:
        self.report.read_bytes += size

    def _full(self) -> Batch:
        batch, self.batch = self.batch, Batch()
        return batch

    def _add(self, chunk: Chunk) -> None:
        """Puts what is new of a chunk into the batch."""
        hashes = chunk.hashes()
        key = key_of(hashes, self.ledger.topic, self.ledger.dataset)
        known = None if self.again else self.ledger.entries.get(key)
        if known is not None and not known.rejected:
            self.report.already_published += known.documents
            return
        good: list[_Good] = []
        prepare = self.recorder.prepare
        for name, item in zip(hashes, chunk.items, strict=True):
            if isinstance(item, Text):
                try:
                    document = decode(item.raw)
                    good.append((name[:HASH_BYTES], own_id(document), prepare(item.raw, document)))
                    continue
                except BadRecord as error:
                    reason = error.message
            else:
                reason = item.reason
            where = "" if item.element is None else f"element {item.element}: "
            self.refused.add(Reject(file=chunk.file, line=item.line, reason=where + reason, raw=item.raw))
        new = good if self.again else self._not_yet(good)
        self.report.already_published += len(good) - len(new)
        for name, own, prepared in new:
            self._count(name, own, prepared.format)
        if known is not None and not new:
            return
        rejected = len(chunk.items) - len(good)
        stays_open = chunk.short or rejected
        entry = Entry(
            documents=len(good), rejected=rejected, hashes=tuple(name for name, _, _ in good) if stays_open else ()
        )
        self.ledger.add(key, entry)
        value = entry_json(
            entry,
            topic=self.ledger.topic,
            dataset=self.ledger.dataset,
            producer=self.producer,
            file=chunk.file,
            at_ms=int(self.clock.now() * 1000),
        )
        self.batch.entries.append((key, entry, value))
        self.batch.records += [prepared for _, _, prepared in new]
        self.batch.size_bytes += sum(len(prepared.value) for _, _, prepared in new)

    def _not_yet(self, good: list[_Good]) -> list[_Good]:
        """What an earlier version of the chunk did not hold. Of equal documents the last ones are the new ones."""
        remaining = self.ledger.remaining([name for name, _, _ in good])
        if remaining.total() == len(good):
            return good
        new: list[_Good] = []
        for found in reversed(good):
            if remaining[found[0]]:
                remaining[found[0]] -= 1
                new.append(found)
        return new[::-1]

    def _count(self, name: bytes, own: str | None, format: str) -> None:
        report = self.report
        report.by_format[format] = report.by_format.get(format, 0) + 1
        if own is None or (len(self.ids) >= MAX_IDS and own not in self.ids):
            return
        if self.ids.setdefault(own, name) != name:
            report.same_id_other_content += 1
