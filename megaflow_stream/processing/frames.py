"""What goes through the pipe between a worker and its compute process.

A request is a frame (processor number, length) and an Arrow IPC stream of one batch; an answer is a frame (status,
length) and a pickle: `Answer` for DONE, the error's text for RAISED. Both ends are ours; nothing else writes the pipe.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson
import pyarrow as pa

from megaflow_stream.bus.api import OutRecord, Record
from megaflow_stream.bus.partitioner import partition_of
from megaflow_stream.definitions.processor import Dropped, Processor, Rejected, Result, Sink, Statistic
from megaflow_stream.errors import SettingError

HEAD = struct.Struct("<BQ")
DONE, RAISED = 0, 1


@dataclass(slots=True)
class Answer:
    """A handler's result, ready to be sent.

    records: per topic and output partition (None: the input's) the records for it.
    """

    records: dict[tuple[str, int | None], list[OutRecord]] = field(default_factory=dict)
    dropped: Sequence[Dropped] = ()
    rejected: Sequence[Rejected] = ()
    statistics: Sequence[Statistic] = ()


def encode_batch(batch: pa.RecordBatch) -> pa.Buffer:
    """An Arrow IPC stream of one batch."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    return stream.getvalue()


def decode_batch(data: pa.Buffer | bytes) -> pa.RecordBatch:
    """The one batch of an Arrow IPC stream."""
    return pa.ipc.open_stream(data).read_next_batch()


def input_batch(processor: Processor, records: Sequence[Record], topic: str, partition: int) -> pa.RecordBatch:
    """The batch that a handler is given: see `definitions.processor`. The schema's metadata names the partition."""
    columns = [
        pa.array([r.offset for r in records], pa.int64()),
        pa.array([r.timestamp for r in records], pa.int64()),
        pa.array([r.key for r in records], pa.binary()),
        pa.array([r.value for r in records], pa.binary()),
    ]
    names = ["offset", "timestamp", "key", "value"]
    if processor.headers:
        headers = [dict(r.headers) for r in records]
        for name in processor.headers:
            columns.append(pa.array([h.get(name) for h in headers], pa.binary()))
            names.append(f"header:{name}")
    batch = pa.RecordBatch.from_arrays(columns, names)
    return batch.replace_schema_metadata({"topic": topic, "partition": str(partition)})


def answer_of(processor: Processor, result: Result, partitions: Mapping[str, int]) -> Answer:
    """Turns a handler's result into records. partitions: of each topic that a sink writes by key.

    Raises `SettingError` for an output that no sink of the processor names, and `TypeError` or `ValueError` for what
    has no form as JSON or UTF-8: here the record to blame can be found, in the transaction it would fail for ever."""
    answer = Answer(dropped=result.dropped, rejected=result.rejected, statistics=result.statistics)
    _check(answer)
    for topic, batch in result.outputs.items():
        sink = sink_of(processor, topic)
        if not batch.num_rows:
            continue
        static = [(name, value.encode()) for name, value in sink.headers.items()]
        if sink.format == "arrow":
            record = OutRecord(encode_batch(batch).to_pybytes(), None, static)
            answer.records.setdefault((topic, None), []).append(record)
            continue
        for record in _rows(batch, static):
            where = None
            if sink.partition == "key":
                if record.key is None:
                    raise SettingError(f"an output for {topic} has no key, and its sink is partitioned by key")
                where = partition_of(record.key, partitions[topic])
            answer.records.setdefault((topic, where), []).append(record)
    return answer


def _check(answer: Answer) -> None:
    texts = [text for d in answer.dropped for text in (d.conversation, d.reason)]
    texts += [text for r in answer.rejected for text in (r.error, r.conversation)]
    "".join(texts).encode()
    orjson.dumps([(s.dataset, s.producer, dict(s.counts)) for s in answer.statistics])


def sink_of(processor: Processor, topic: str) -> Sink:
    """The sink that an output's topic belongs to: by its name, or by the family's pattern."""
    for sink in processor.sinks:
        before, brace, rest = sink.topic.partition("{")
        after = rest.partition("}")[2]
        if topic == sink.topic or (
            brace and topic.startswith(before) and topic.endswith(after) and len(topic) > len(before) + len(after)
        ):
            return sink
    raise SettingError(
        f"processor {processor.name} made an output for {topic}, and declares no such sink",
        hint="its sinks are: " + ", ".join(sink.topic for sink in processor.sinks),
    )


def _rows(batch: pa.RecordBatch, static: list[tuple[str, bytes]]) -> list[OutRecord]:
    columns = {name: _bytes(batch.column(name)) for name in batch.schema.names}
    values = columns["value"]
    keys = columns.get("key") or [None] * len(values)
    named = [(n.removeprefix("header:"), c) for n, c in columns.items() if n.startswith("header:")]
    if not named:
        return [OutRecord(value, key, static) for value, key in zip(values, keys, strict=True)]
    names = [name for name, _ in named]
    rows = zip(*(column for _, column in named), strict=True)
    return [
        OutRecord(value, key, static + [(n, v) for n, v in zip(names, row, strict=True) if v is not None])
        for value, key, row in zip(values, keys, rows, strict=True)
    ]


def _bytes(column: pa.Array) -> list[bytes | None]:
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.binary())
    values: list[bytes | None] = column.to_pylist()
    return values


def pack(answer: Answer) -> bytes:
    return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Answer:
    answer: Answer = pickle.loads(data)
    return answer
