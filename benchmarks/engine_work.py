"""The work of the engine's benchmark: decode, clean, mask, four features, encode. Loaded by path, as a project's."""

from __future__ import annotations

import os
import re
import unicodedata
import zlib
from dataclasses import dataclass

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from megaflow_stream.definitions.processor import Handler, Processor, Result, Sink

ROLES = ["system", "user", "assistant", "tool"]
# Read alike by Python's re (ASCII) and RE2: no look-around. It starts at a word boundary, or it is seven times slower.
PII = r"\b(?:[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[0-9]{3}\)?[ .-][0-9]{3}[ .-][0-9]{4}\b)"
_MASK = re.compile(PII, re.ASCII).sub
_INDEX = {role: number for number, role in enumerate(ROLES)}
_SCHEMA = pa.schema([("id", pa.string()), ("role", pa.string()), ("content", pa.string())])
_PARSE = pj.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore")


def one(raw: bytes) -> bytes:
    """One record in plain Python: the loop in memory that every system is compared with."""
    record = orjson.loads(raw)
    text = _MASK("<pii>", " ".join(unicodedata.normalize("NFC", record["content"]).split()))
    return orjson.dumps(
        {
            "id": record["id"],
            "role": record["role"],
            "text": text,
            "chars": len(text),
            "words": text.count(" ") + 1 if text else 0,
            "role_index": _INDEX.get(record["role"], -1),
            "id_hash": zlib.crc32(record["id"].encode()) % 1000,
        }
    )


def columns(values: list[bytes]) -> pa.RecordBatch:
    """The same work on a batch, by Arrow's kernels."""
    data = b"\n".join(values)
    read = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
    table = pj.read_json(pa.BufferReader(data), read, _PARSE).combine_chunks()
    ids, roles, text = (table.column(name).chunk(0) for name in ("id", "role", "content"))
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pc.utf8_normalize(text, "NFC")))
    text = pc.replace_substring_regex(pc.binary_join(words, " "), PII, "<pii>")
    chars = pc.utf8_length(text)
    spaces = pc.add(pc.count_substring(text, " "), 1)
    return pa.RecordBatch.from_arrays(
        [
            ids,
            roles,
            text,
            chars,
            pc.if_else(pc.equal(chars, 0), 0, spaces),
            pc.fill_null(pc.index_in(roles, value_set=pa.array(ROLES)), -1),
            pa.array([zlib.crc32(i.encode()) % 1000 for i in ids.to_pylist()], pa.int32()),
        ],
        ["id", "role", "text", "chars", "words", "role_index", "id_hash"],
    )


OUT = os.environ.get("BENCH_OUT", "bench.out")


@dataclass(frozen=True)
class Arrow:
    """One Arrow IPC record a batch."""

    def __call__(self) -> Handler:
        return lambda batch: Result(outputs={OUT: columns(batch.column("value").to_pylist())})


@dataclass(frozen=True)
class Json:
    """One JSON record a record: encoded from Arrow's columns."""

    def __call__(self) -> Handler:
        return self.handle

    def handle(self, batch: pa.RecordBatch) -> Result:
        made = columns(batch.column("value").to_pylist())
        names = made.schema.names
        rows = zip(*(column.to_pylist() for column in made.columns), strict=True)
        values = [orjson.dumps(dict(zip(names, row, strict=True))) for row in rows]
        return Result(outputs={OUT: pa.record_batch([pa.array(values, pa.binary())], ["value"])})


def _processor(name: str, build: Arrow | Json, format: str, **options: int) -> Processor:
    return Processor(
        name=f"{OUT}-{name}",
        source="bench.raw",
        build=build,
        sinks=[Sink(topic=OUT, format=format)],  # type: ignore[arg-type]
        dead_letters="bench.dlq",
        dropped="bench.dropped",
        statistics="bench.statistics",
        **options,
    )


arrow = _processor("arrow", Arrow(), "arrow")
json = _processor("json", Json(), "records")
