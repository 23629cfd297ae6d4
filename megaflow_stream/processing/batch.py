"""What became of one batch of input records, until its transaction: outputs, dead letters, drops, counts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from megaflow_stream.bus.api import OutRecord, Record, TopicPartition
from megaflow_stream.definitions.processor import Dropped, Processor, Rejected
from megaflow_stream.errors import NotFound
from megaflow_stream.processing.frames import Answer

_JSON = [("content-type", b"application/json")]


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
    changelog: bytes = b""
    counts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def duplicates(self, records: Sequence[Record]) -> None:
        for record in records:
            headers = dict(record.headers)
            conversation = headers.get("conversation", b"").decode(errors="replace")
            self.dropped.append(Dropped(record.offset, conversation, "duplicate"))
            self._count(headers, "duplicates")

    def add(self, answer: Answer, rows: Mapping[int, Record]) -> None:
        self.answers.append(answer)
        self.dropped += answer.dropped
        for rejected in answer.rejected:
            self.reject(rows[rejected.offset], rejected, 1)
        for dataset, producer, counts in answer.statistics:
            into = self.counts.setdefault((dataset, producer), {})
            for name, count in counts.items():
                into[name] = into.get(name, 0) + count

    def reject(self, record: Record, rejected: Rejected, attempts: int) -> None:
        self.rejected.append((record, rejected, attempts))
        if attempts > 1:  # the handler did not live to count it
            self._count(dict(record.headers), "rejected")

    def _count(self, headers: Mapping[str, bytes], name: str) -> None:
        dataset = headers.get("dataset", b"").decode(errors="replace")
        producer = headers.get("producer", b"").decode(errors="replace")
        counts = self.counts.setdefault((dataset, producer), {})
        counts[name] = counts.get(name, 0) + 1

    def outputs(
        self, processor: Processor, tp: TopicPartition, partitions: Mapping[str, int]
    ) -> dict[tuple[str, int], list[OutRecord]]:
        """Everything that the batch's transaction writes, by topic and partition."""
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
            put(processor.dead_letters, tp.partition, [_dead_letter(processor, *r) for r in self.rejected])
        if self.dropped:
            at_ms = int(time.time() * 1000)
            put(processor.dropped, tp.partition, [_dropped(processor, tp, d, at_ms) for d in self.dropped])
        if self.changelog and processor.state is not None:
            record = OutRecord(self.changelog, b"%d" % self.end, [])
            put(processor.state.changelog, tp.partition, [record])
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
                _JSON,
            )
            for (dataset, producer), counts in self.counts.items()
        ]


def _dead_letter(processor: Processor, record: Record, rejected: Rejected, attempts: int) -> OutRecord:
    """The record as it came, with what happened to it in headers of their own."""
    mine = {
        "origin-topic": record.topic,
        "origin-partition": str(record.partition),
        "origin-offset": str(record.offset),
        "processor": processor.name,
        "error": rejected.error[:2000],
        "attempt": str(attempts),
    }
    if rejected.conversation:
        mine["conversation"] = rejected.conversation
    kept = [(name, value) for name, value in record.headers if name not in mine]
    return OutRecord(record.value, record.key, kept + [(name, value.encode()) for name, value in mine.items()])


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
    return OutRecord(orjson.dumps(value), dropped.conversation.encode(), _JSON)
