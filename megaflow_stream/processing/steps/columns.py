"""Columns of a batch as Python values, and counts by dataset and producer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from megaflow_stream.definitions.processor import Statistic


def values(batch: pa.RecordBatch, name: str) -> list[Any]:
    """The values of a column, None where it is null or where the batch has no such column."""
    place = batch.schema.get_field_index(name)
    return batch.column(place).to_pylist() if place >= 0 else [None] * batch.num_rows


def texts(batch: pa.RecordBatch, name: str) -> list[str]:
    """The values of a header's column as text, "" where there is none."""
    return [
        value if isinstance(value, str) else value.decode(errors="replace") if value else ""
        for value in values(batch, f"header:{name}")
    ]


def metadata(batch: pa.RecordBatch, name: bytes) -> str:
    """What the engine said of the whole batch: `topic`, `partition`."""
    found: Mapping[bytes, bytes] = batch.schema.metadata or {}
    return found.get(name, b"").decode()


class Counts:
    """Counts by dataset and producer."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Counter[str]] = {}

    def add(self, dataset: str, producer: str, **counts: int) -> None:
        self._counts.setdefault((dataset, producer), Counter()).update(counts)

    def statistics(self) -> list[Statistic]:
        """In the order of first mention; counts that stayed 0 are kept, so that a reader finds every name."""
        return [Statistic(dataset, producer, dict(counts)) for (dataset, producer), counts in self._counts.items()]
