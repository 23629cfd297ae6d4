"""A record that no handler could process, as it goes to the dead-letter topic: as it came, and what happened to it.

A letter that the topic would refuse fails its transaction for ever, so it is cut to fit, and says where the whole
stands: `origin-topic`, `origin-partition` and `origin-offset`, with `value-bytes` and `value-sha256` to know it by.
"""

from __future__ import annotations

import hashlib

from megaflow_stream.bus.api import Headers, OutRecord, Record
from megaflow_stream.definitions.processor import Processor, Rejected

_ERROR_LETTERS = 2000
# On the broker a batch of one record has 61 bytes before it, the record at most 34 of its own, and a header two
# lengths of at most 5 bytes (Kafka protocol, record batch format 2).
_FRAME_BYTES, _HEADER_BYTES = 100, 10


def dead_letter(
    processor: Processor, record: Record, rejected: Rejected, attempts: int, limit: int | None = None
) -> OutRecord:
    """The letter, of `limit` bytes at most on the broker; None where the limit is not known.

    Of one that is too large the end of the value is left out, and, where that is not enough, the key and the headers
    that the record came with.
    """
    mine = {
        "origin-topic": record.topic,
        "origin-partition": str(record.partition),
        "origin-offset": str(record.offset),
        "processor": processor.name,
        "error": rejected.error[:_ERROR_LETTERS],
        "attempt": str(attempts),
    }
    if rejected.conversation:
        mine["conversation"] = rejected.conversation
    theirs = [(name, value) for name, value in record.headers if name not in mine]
    whole = OutRecord(record.value, record.key, theirs + _encoded(mine))
    value = record.value or b""
    if limit is None or _size_bytes(len(value), record.key, whole.headers) <= limit:
        return whole
    mine |= {"value-bytes": str(len(value)), "value-sha256": hashlib.sha256(value).hexdigest()}
    key, headers = record.key, theirs + _encoded(mine)
    if _size_bytes(0, key, headers) > limit:
        key, headers = None, _encoded(mine | {"left-out": "key and headers"})
    room = max(0, limit - _size_bytes(0, key, headers))
    return OutRecord(record.value and record.value[:room], key, headers)


def _encoded(headers: dict[str, str]) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in headers.items()]


def _size_bytes(value_bytes: int, key: bytes | None, headers: Headers | None) -> int:
    texts = sum(len(name.encode()) + len(value or b"") + _HEADER_BYTES for name, value in headers or ())
    return value_bytes + len(key or b"") + texts + _FRAME_BYTES
