"""Rows of a Parquet file as JSON texts. Columns that hold JSON text are decoded where a dialect needs a list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from megaflow_stream.conversations.jsontext import BadInput, Text
from megaflow_stream.errors import BadRecord

MAGIC = b"PAR1"
ROWS = 256
# The dialects' lists of messages; other columns (tools, info) stay the text that they are.
MESSAGE_COLUMNS = ("messages", "conversations", "traj")


def rows(stream: BinaryIO) -> Iterator[Text | BadInput]:
    """Every row, its `line` the number of the row from 1. Raises `BadRecord` where the file cannot be read."""
    number = 0
    try:
        with pq.ParquetFile(stream) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield _text(number, row)
    except (pa.ArrowException, OSError) as error:
        raise BadRecord(f"the Parquet file cannot be read after row {number}: {error}") from error


def _text(number: int, row: dict[str, Any]) -> Text | BadInput:
    document = {key: value for key, value in row.items() if value is not None}
    try:
        for key in MESSAGE_COLUMNS:
            value = document.get(key)
            if isinstance(value, (str, bytes)) and value.lstrip()[:1] in ("[", b"["):
                document[key] = orjson.loads(value)
            elif isinstance(value, list):
                document[key] = [_without_nulls(item) for item in value]
        return Text(number, orjson.dumps(document, default=_string))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, UnicodeDecodeError) as error:
        return BadInput(number, f"the row is no JSON document: {error}", repr(row).encode()[: 1 << 16])


def _without_nulls(item: object) -> object:
    """Columns of structs give every message every key: null means that it has none."""
    return {key: value for key, value in item.items() if value is not None} if isinstance(item, dict) else item


def _string(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
