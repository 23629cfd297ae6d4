"""Counts by dataset and producer that stay exact: what processors write, and how the agent adds it up.

A processor writes one `Counted` per batch, dataset and producer in the batch's own transaction, with the range of
input offsets that it counts. One source (processor, input topic, input partition) writes its ranges in order. The
agent keeps for each source the end of the last range that it added; a range that begins before it was added before.
So adding is idempotent, and two copies of the same totals merge source by source: the further one holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import orjson

from megaflow_stream.definitions.processor import Statistic
from megaflow_stream.errors import BadRecord


def aggregate(statistics: Iterable[Statistic]) -> list[Statistic]:
    """One Statistic per (dataset, producer), in the order in which each came first; counts of one name are added."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for statistic in statistics:
        counts = found.setdefault((statistic.dataset, statistic.producer), {})
        for name, count in statistic.counts.items():
            counts[name] = counts.get(name, 0) + count
    return [Statistic(dataset, producer, counts) for (dataset, producer), counts in found.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """A record of `processing.statistics`: what a processor counted in the input offsets [begin, end)."""

    processor: str
    topic: str
    partition: int
    begin: int
    end: int
    dataset: str
    producer: str
    counts: Mapping[str, int]

    @property
    def source(self) -> str:
        return f"{self.processor}/{self.topic}/{self.partition}"

    @property
    def key(self) -> str:
        return totals_key(self.dataset, self.producer)

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def decode(cls, value: bytes | None) -> Counted:
        """Raises `BadRecord` that says which field is wrong."""
        try:
            document = orjson.loads(value or b"")
        except orjson.JSONDecodeError as error:
            raise BadRecord(f"reading a statistics record: not JSON: {error}") from error
        if not isinstance(document, dict):
            raise BadRecord("reading a statistics record: not an object")
        for name in ("processor", "topic", "dataset", "producer"):
            if not isinstance(document.get(name), str):
                raise BadRecord(f"reading a statistics record: {name} is not a string")
        for name in ("partition", "begin", "end"):
            if type(document.get(name)) is not int or document[name] < 0:
                raise BadRecord(f"reading a statistics record: {name} is not a number of 0 or more")
        if document["begin"] >= document["end"]:
            raise BadRecord("reading a statistics record: its range is empty")
        counts = document.get("counts")
        if not isinstance(counts, dict) or not all(type(count) is int for count in counts.values()):
            raise BadRecord("reading a statistics record: counts is not an object of whole numbers")
        return cls(**{name: document[name] for name in cls.__slots__})


def totals_key(dataset: str, producer: str) -> str:
    """DATASET/PRODUCER; a slash inside a name is written %2F."""
    return "/".join(name.replace("%", "%25").replace("/", "%2F") for name in (dataset, producer))


class SourceTotals(NamedTuple):
    """What one source counted, up to the input offset `end`."""

    end: int
    counts: Mapping[str, int]


class Outcome(Enum):
    """What became of a range: added; had before; or partly had before, which no source of ours does."""

    ADDED = "added"
    REPEATED = "repeated"
    OVERLAPPING = "overlapping"


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The counts of one dataset and producer, by source. Names beside each other in `sources` are of one source."""

    dataset: str
    producer: str
    sources: Mapping[str, SourceTotals] = field(default_factory=dict)

    def add(self, counted: Counted) -> tuple[Totals, Outcome]:
        """These totals with a range added, unless it had been."""
        had = self.sources.get(counted.source, SourceTotals(0, {}))
        if counted.begin < had.end:
            return self, Outcome.REPEATED if counted.end <= had.end else Outcome.OVERLAPPING
        counts = dict(had.counts)
        for name, count in counted.counts.items():
            counts[name] = counts.get(name, 0) + count
        sources = {**self.sources, counted.source: SourceTotals(counted.end, counts)}
        return Totals(dataset=self.dataset, producer=self.producer, sources=sources), Outcome.ADDED

    def merge(self, other: Totals) -> Totals:
        """Of each source the totals that go further."""
        sources = dict(self.sources)
        for source, totals in other.sources.items():
            if source not in sources or totals.end > sources[source].end:
                sources[source] = totals
        return Totals(dataset=self.dataset, producer=self.producer, sources=sources)

    def counts(self) -> dict[str, dict[str, int]]:
        """Counts by processor and name, over all its input partitions."""
        found: dict[str, dict[str, int]] = {}
        for source in sorted(self.sources):
            counts = found.setdefault(source.split("/", 1)[0], {})
            for name, count in self.sources[source].counts.items():
                counts[name] = counts.get(name, 0) + count
        return found

    def document(self) -> dict[str, Any]:
        """What `dataset.statistics` serves as JSON: dataset, producer, counts by processor, sources."""
        return {
            "dataset": self.dataset,
            "producer": self.producer,
            "counts": self.counts(),
            "sources": {n: {"end": s.end, "counts": dict(s.counts)} for n, s in sorted(self.sources.items())},
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Totals:
        return cls(
            dataset=document["dataset"],
            producer=document["producer"],
            sources={n: SourceTotals(s["end"], s["counts"]) for n, s in document["sources"].items()},
        )
