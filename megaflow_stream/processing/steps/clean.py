"""The processor `clean`: documents as they came -> canonical conversations without personal data.

Its output is keyed by a hash of the content after masking, so that the same conversation published twice, under
whatever id, comes to one partition of the next topic and is de-duplicated there.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
import pyarrow as pa

from megaflow_stream.conversations.canonical import Conversation, content_hash, to_json
from megaflow_stream.definitions.processor import Dropped, Handler, Rejected, Result
from megaflow_stream.errors import BadRecord
from megaflow_stream.processing.steps import columns
from megaflow_stream.processing.steps.normalise import DEFAULT_DATASET, Unwanted, normalise
from megaflow_stream.processing.steps.redact import redact

HEADERS = ("dataset", "producer", "format", "traceparent")
"""Input headers that the handler reads."""

_OUTPUT = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("header:conversation", pa.string()),
        ("header:dataset", pa.string()),
        ("header:producer", pa.string()),
        ("header:source", pa.string()),
        ("header:traceparent", pa.binary()),
    ]
)

_ZERO = dict.fromkeys(("conversations_out", "dropped", "rejected", "redactions", "messages"), 0)


@dataclass(frozen=True, kw_only=True)
class Clean:
    """Builds the handler.

    output: the topic that it writes.
    """

    output: str = "conversations.clean"

    def __call__(self) -> Handler:
        return self.handle

    def handle(self, batch: pa.RecordBatch) -> Result:
        """One row out for each conversation; the others dropped or rejected, with the reason."""
        topic, partition = (columns.metadata(batch, name) for name in (b"topic", b"partition"))
        keys, values, offsets = (columns.values(batch, name) for name in ("key", "value", "offset"))
        datasets, producers, formats = (columns.texts(batch, name) for name in ("dataset", "producer", "format"))
        traces = columns.values(batch, "header:traceparent")
        rows: list[tuple[object, ...]] = []
        dropped: list[Dropped] = []
        rejected: list[Rejected] = []
        counts = columns.Counts()
        for row, (offset, key, value) in enumerate(zip(offsets, keys, values, strict=True)):
            dataset, producer = datasets[row] or DEFAULT_DATASET, producers[row]
            counts.add(dataset, producer, conversations_in=1, bytes=len(value or b""), **_ZERO)
            try:
                found = normalise(value, key=key, dataset=dataset, format=formats[row])
                conversation, masked = redact(found)
                document = _encoded(conversation)
            except Unwanted as unwanted:
                counts.add(dataset, producer, dropped=1)
                dropped.append(Dropped(offset, unwanted.conversation, unwanted.reason))
                continue
            except BadRecord as error:
                counts.add(dataset, producer, rejected=1)
                rejected.append(Rejected(offset, str(error), (key or b"").decode(errors="replace")))
                continue
            counts.add(
                dataset,
                producer,
                conversations_out=1,
                messages=len(conversation.messages),
                redactions=sum(masked.values()),
                **{f"redactions_{kind}": count for kind, count in masked.items()},
            )
            rows.append(
                (
                    content_hash(conversation.messages, conversation.tools),
                    document,
                    conversation.id,
                    conversation.dataset,
                    producer or None,
                    f"{topic}/{partition}/{offset}",
                    traces[row],
                )
            )
        arrays = [pa.array([row[place] for row in rows], field.type) for place, field in enumerate(_OUTPUT)]
        return Result(
            outputs={self.output: pa.record_batch(arrays, schema=_OUTPUT)} if rows else {},
            dropped=dropped,
            rejected=rejected,
            statistics=counts.statistics(),
        )


def _encoded(conversation: Conversation) -> bytes:
    try:
        return to_json(conversation)
    except orjson.JSONEncodeError as error:  # metadata nested past 254 levels
        raise BadRecord(f"the conversation cannot be written as JSON: {error}") from error
