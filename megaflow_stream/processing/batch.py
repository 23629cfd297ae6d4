"""What became of one batch of input records, until its transaction: outputs, dead letters, drops, counts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import orjson

from megaflow_stream.bus.api import OutRecord, Record, TopicPartition, json_headers
from megaflow_stream.definitions.processor import Dropped, Processor, Rejected
from megaflow_stream.errors import NotFound
from megaflow_stream.processing.dead_letter import dead_letter
from megaflow_stream.processing.frames import Answer

_DROPPED, _STATISTICS = json_headers("megaflow.dropped/1"), json_headers("megaflow.statistics/1")


@dataclass(kw_only=True)
class Batch:
    """The input offsets [begin, end) of one partition, and everything that was made of them."""

    begin: int
    end: int
    size_bytes: int
    records: int
    answers: list[Answer] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    rejected: list[tuple[Record, Rejected, int]] = field(default_factory=list)
    changelog: OutRecord | None = None
    counts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def duplicates(self, records: Sequence[Record]) -> None:
        for record in records:
            headers = dict(record.headers)
            conversation = headers.get("conversation", b"").decode(errors="replace")
            self.dropped.append(Dropped(record.offset, conversation, "duplicate"))
            self._count(headers, "duplicates")

    def add(self, answer: Answer, records: Sequence[Record]) -> None:
        """What the handler made of `records`. It has counted what it rejects."""
        self.answers.append(answer)
        self.dropped += answer.dropped
        if answer.rejected:
            rows = {record.offset: record for record in records}
            self.rejected += [(rows[rejected.offset], rejected, 1) for rejected in answer.rejected]
        for dataset, producer, counts in answer.statistics:
            into = self.counts.setdefault((dataset, producer), {})
            for name, count in counts.items():
                into[name] = into.get(name, 0) + count

    def reject(self, record: Record, error: str, attempts: int) -> None:
        """A record that failed its handler, which did not live to count it."""
        self.rejected.append((record, Rejected(record.offset, error), attempts))
        self._count(dict(record.headers), "rejected")

    def _count(self, headers: Mapping[str, bytes], name: str) -> None:
        dataset = headers.get("dataset", b"").decode(errors="replace")
        producer = headers.get("producer", b"").decode(errors="replace")
        counts = self.counts.setdefault((dataset, producer), {})
        counts[name] = counts.get(name, 0) + 1

    def outputs(
        self,
        processor: Processor,
        tp: TopicPartition,
        partitions: Mapping[str, int],
        limits: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[tuple[str, int], list[OutRecord]]:
        """Everything that the batch's transaction writes, by topic and partition.

        partitions: how many each topic has. limits: bytes of a record that a topic takes, where they are known.
        """
        out: dict[tuple[str, int], list[OutRecord]] = {}

        def put(topic: str, partition: int, records: Sequence[OutRecord]) -> None:
            if topic not in partitions:
                raise NotFound(
                    f"processor {processor.name} made an output for {topic}, which is not there",
                    hint="declare it in topics/, `megaflow topics apply`, then start the worker again",
                    topic=topic,
                )
            out.setdefault((topic, partition % partitions[topic]), []).extend(records)

        for answer in self.answers:
            for (topic, where), records in answer.records.items():
                put(topic, tp.partition if where is None else where, records)
        if self.rejected:
            limit = limits.get(processor.dead_letters)
            letters = [dead_letter(processor, *rejected, limit) for rejected in self.rejected]
            put(processor.dead_letters, tp.partition, letters)
        if self.dropped:
            at_ms = int(time.time() * 1000)
            put(processor.dropped, tp.partition, [_dropped(processor, tp, d, at_ms) for d in self.dropped])
        if self.changelog and processor.state is not None:
            put(processor.state.changelog, tp.partition, [self.changelog])
        if self.counts:
            put(processor.statistics, tp.partition, self._statistics(processor, tp))
        return out

    def _statistics(self, processor: Processor, tp: TopicPartition) -> list[OutRecord]:
        return [
            OutRecord(
                orjson.dumps(
                    {
                        "processor": processor.name,
                        "topic": tp.topic,
                        "partition": tp.partition,
                        "begin": self.begin,
                        "end": self.end,
                        "dataset": dataset,
                        "producer": producer,
                        "counts": counts,
                    }
                ),
                f"{dataset}/{producer}".encode(),
                _STATISTICS,
            )
            for (dataset, producer), counts in self.counts.items()
        ]


def _dropped(processor: Processor, tp: TopicPartition, dropped: Dropped, at_ms: int) -> OutRecord:
    value = {
        "conversation": dropped.conversation,
        "reason": dropped.reason,
        "processor": processor.name,
        "topic": tp.topic,
        "partition": tp.partition,
        "offset": dropped.offset,
        "at_ms": at_ms,
    }
    return OutRecord(orjson.dumps(value), dropped.conversation.encode(), _DROPPED)
