"""A processor's handler without a bus: `run_processor` for unit tests of a processor."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from megaflow_stream.bus.api import Headers, OutRecord, Record
from megaflow_stream.definitions.processor import Dropped, Handler, Processor, Rejected, Statistic
from megaflow_stream.processing.compute import HandlerRaised
from megaflow_stream.processing.dedup_state import DedupState
from megaflow_stream.processing.frames import Answer, answer_of, decode_batch, input_batch
from megaflow_stream.testing.log import MemoryRecord

# Of every topic that a sink writes by key; `run_processor` does not say which partition.
_ANY = collections.defaultdict[str, int](lambda: 1)


@dataclass(kw_only=True)
class Outcome:
    """What became of the records that `run_processor` was given.

    outputs: the records for each topic, in order. dropped, rejected: by the offset of the input record, which is its
    place in the list. statistics: as the handler gave them, one list for all batches.
    """

    outputs: dict[str, list[OutRecord]] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    statistics: list[Statistic] = field(default_factory=list)

    def batches(self, topic: str) -> list[pa.RecordBatch]:
        """The outputs for the topic of an `arrow` sink, decoded."""
        return [decode_batch(record.value or b"") for record in self.outputs.get(topic, [])]


def run_processor(
    processor: Processor,
    records: Sequence[tuple[bytes | None, bytes | None, Headers | Mapping[str, bytes]]],
    *,
    partition: int = 0,
) -> Outcome:
    """Runs the handler on `records` (key, value, headers), which get the offsets 0, 1, 2, ... of `partition`, in
    batches of `processor.batch_records`.

    As in the engine, duplicates are dropped where the processor has a state, and where the handler raises, the batch is
    halved until the records to blame are found: they are rejected, with the error's text. `SettingError` for an output
    that no sink declares comes as it is."""
    outcome, handler, state = Outcome(), processor.build(), DedupState() if processor.state else None
    now_ms = int(time.time() * 1000)
    given = [
        MemoryRecord(processor.source, partition, offset, now_ms, key, value, _headers(headers))
        for offset, (key, value, headers) in enumerate(records)
    ]
    for begin in range(0, len(given), processor.batch_records):
        keep: Sequence[Record] = given[begin : begin + processor.batch_records]
        duplicates: Sequence[Record] = []
        if state is not None:
            keep, duplicates = state.fresh(keep)
        while keep:
            rejected = len(outcome.rejected)
            _call(processor, handler, keep, outcome)
            if state is None:
                break
            state.entries(keep, {found.offset for found in outcome.rejected[rejected:]})
            keep, duplicates = state.fresh(duplicates)
        for record in duplicates:
            conversation = dict(record.headers).get("conversation", b"").decode(errors="replace")
            outcome.dropped.append(Dropped(record.offset, conversation, "duplicate"))
    return outcome


class LocalCompute:
    """Calls handlers in this process. See `processing.compute.Compute`. One that hangs, hangs the test."""

    def __init__(self, processors: Sequence[Processor], partitions: Mapping[str, int]) -> None:
        self._made = [(processor, processor.build()) for processor in processors]
        self._partitions = partitions

    async def call(self, number: int, batch: pa.RecordBatch, hang_seconds: float) -> Answer:
        await asyncio.sleep(0)
        processor, handler = self._made[number]
        try:
            return answer_of(processor, handler(batch), self._partitions)
        except Exception as error:
            raise HandlerRaised(f"{type(error).__name__}: {error}") from error

    def cpu_seconds(self) -> float:
        return time.process_time()

    async def close(self) -> None:
        """Holds nothing."""


def _call(processor: Processor, handler: Handler, records: Sequence[Record], outcome: Outcome) -> None:
    batch = input_batch(processor, records, processor.source, records[0].partition)
    try:
        result = handler(batch)
    except Exception as error:
        if len(records) == 1:
            outcome.rejected.append(Rejected(records[0].offset, f"{type(error).__name__}: {error}"))
            return
        half = len(records) // 2
        _call(processor, handler, records[:half], outcome)
        _call(processor, handler, records[half:], outcome)
        return
    answer = answer_of(processor, result, _ANY)
    for (topic, _), made in answer.records.items():
        outcome.outputs.setdefault(topic, []).extend(made)
    outcome.dropped += answer.dropped
    outcome.rejected += answer.rejected
    outcome.statistics += answer.statistics


def _headers(headers: Headers | Mapping[str, bytes]) -> tuple[tuple[str, bytes], ...]:
    return tuple(headers.items() if isinstance(headers, Mapping) else headers)
