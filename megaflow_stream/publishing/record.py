"""From a document to the record on the topic."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megaflow_stream.bus.api import Headers
from megaflow_stream.conversations.detect import AUTO, detect
from megaflow_stream.conversations.identity import own_id
from megaflow_stream.conversations.parsers import PARSERS, PLAIN, parser
from megaflow_stream.errors import BadRecord

SCHEMA = b"megaflow.raw/1"
MAX_KEY_BYTES = 1 << 10  # an id, not a document
# Of a batch of one record: its header of 61 bytes, lengths, offsets and times, and the counts of the headers.
_OVERHEAD_BYTES = 128


class Prepared(NamedTuple):
    """A record of `conversations.raw` and the dialect that it was read as."""

    key: bytes
    value: bytes
    headers: Headers
    format: str


class Recorder:
    """Makes records of one dataset and producer for one topic.

    format: the dialect, or auto: by each document's content.
    max_message_bytes: what the topic takes.
    """

    def __init__(self, *, dataset: str, producer: str, format: str, max_message_bytes: int) -> None:
        self.dataset, self.max_message_bytes = dataset, max_message_bytes
        if format != AUTO:
            parser(format)  # refuses what it does not know
        self._format = "" if format == AUTO else format.replace("-", "_").lower()
        self._fixed = [
            ("content-type", b"application/json"),
            ("schema", SCHEMA),
            ("dataset", dataset.encode()),
            ("producer", producer.encode()),
        ]
        self._fixed_bytes = sum(len(name) + len(value) for name, value in self._fixed)
        self._by_format = {name: [*self._fixed, ("format", name.encode())] for name in PARSERS}
        self._traces = traceparents()

    def prepare(self, raw: bytes, document: Mapping[str, Any]) -> Prepared:
        """Raises `BadRecord` where the document cannot be read as a conversation or is too large."""
        name = self._format or detect(document)
        own = own_id(document)
        plain = PLAIN.get(name)
        if own is None or plain is None or not plain(document):
            conversation_id = PARSERS[name].parse(document, self.dataset).id
        else:
            conversation_id = own
        try:
            key = conversation_id.encode()
        except UnicodeEncodeError as error:
            raise BadRecord(f"the id is no valid text: {error}") from error
        if len(key) > MAX_KEY_BYTES:
            raise BadRecord(f"the id has {len(key)} bytes; at most {MAX_KEY_BYTES} are taken")
        size = len(key) + len(raw) + self._fixed_bytes + _OVERHEAD_BYTES
        if size > self.max_message_bytes:
            raise BadRecord(
                f"the record has {size} bytes; the topic takes {self.max_message_bytes} (`max_message` of its YAML)"
            )
        return Prepared(key, raw, [*self._by_format[name], ("traceparent", next(self._traces))], name)


def traceparents() -> Iterator[bytes]:
    """New traces' headers (W3C Trace Context, version 00), sampled."""
    while True:
        tokens = os.urandom(24 * 256).hex().encode()  # one system call for many
        for at in range(0, len(tokens), 48):
            yield b"00-%b-%b-01" % (tokens[at : at + 32], tokens[at + 32 : at + 48])
