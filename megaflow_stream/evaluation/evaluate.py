"""The loss of a model on the validation records up to a cut, in nats per trainable token.

Partitions are read one after another, records in order, in micro-slices of a fixed shape: the same model and cut give
the same bits. One reader is open at a time, and closed whatever happens; memory holds one micro-slice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

import torch
from torch import nn

from megaflow_stream.bus.api import Bus, Reader, TopicPartition
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.errors import BadRecord, MegaflowError, ServiceUnreachable
from megaflow_stream.evaluation.cut import Cut, partitions
from megaflow_stream.features.record import PackedSequence, decode
from megaflow_stream.training.batch import micro_batch

FETCH_SECONDS = 0.2
# One thread for all forwards: each thread that computes gets a pool of OpenMP threads of its own.
_COMPUTE = ThreadPoolExecutor(1, thread_name_prefix="evaluate")
STALL_SECONDS = 20.0


class OtherTokenizer(MegaflowError):
    """The validation records were made with another tokenizer than the checkpoint's."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an evaluation found.

    records: packed sequences; bad: records that were none, left out. tokens: trainable ones.
    loss: nats per trainable token; None where there is no trainable token.
    """

    records: int = 0
    bad: int = 0
    tokens: int = 0
    loss: float | None = None

    @property
    def perplexity(self) -> float | None:
        """exp(loss); infinite where that is past a float."""
        if self.loss is None:
            return None
        return math.exp(self.loss) if self.loss < 709.0 else math.inf


async def evaluate(
    bus: Bus,
    trainer: Trainer,
    model: nn.Module,
    cut: Cut,
    *,
    micro_slice: int,
    tokenizer: str | None = None,
    device: torch.device | None = None,
    progress: Callable[[int], None] | None = None,
    clock: Clock | None = None,
) -> Measured:
    """Evaluates `model` on every validation record before `cut`.

    micro_slice: packed sequences of one forward. tokenizer: SHA-256 of the trainer's; features of another are an error.
    progress: called with the records done so far. Raises `RecordsExpired`, `ServiceUnreachable`, `BusError`."""
    device = device or torch.device("cpu")
    total, records, bad, tokens = 0.0, 0, 0, 0
    waiting: list[PackedSequence] = []
    was_training = model.training
    model.eval()

    def forward() -> tuple[float, int]:
        batch = micro_batch(waiting, rows=micro_slice, block_tokens=trainer.block_tokens).to(device)
        if not bool(batch.loss_mask.any()):
            return 0.0, 0
        with torch.inference_mode():
            loss, count = trainer.loss(model, batch)
            return float(loss), int(count)

    async def flush() -> None:
        nonlocal total, records, tokens
        if waiting:
            loss, count = await asyncio.get_running_loop().run_in_executor(_COMPUTE, forward)
            total, tokens, records = total + loss, tokens + count, records + len(waiting)
            waiting.clear()
            if progress is not None:
                progress(records)

    try:
        async with aclosing(_values(bus, cut, clock or SystemClock())) as values:
            async for place, offset, value in values:
                try:
                    sequence = decode(value or b"")
                except BadRecord:
                    bad += 1
                    continue
                if tokenizer and sequence.tokenizer != tokenizer:
                    raise OtherTokenizer(
                        f"the features are of tokenizer {sequence.tokenizer[:12]}, the checkpoint of {tokenizer[:12]}",
                        hint="evaluate on features of the trainer's own tokenizer: process the conversations again",
                        topic=place.topic,
                        partition=place.partition,
                        offset=offset,
                    )
                waiting.append(sequence)
                if len(waiting) == micro_slice:
                    await flush()
        await flush()
    finally:
        model.train(was_training)
    return Measured(records=records, bad=bad, tokens=tokens, loss=total / tokens if tokens else None)


async def _values(bus: Bus, cut: Cut, clock: Clock) -> AsyncGenerator[tuple[TopicPartition, int, bytes | None], None]:
    """(partition, offset, value) of the records before the cut, one partition after another."""
    ends = partitions(cut)
    begins = await bus.begin_offsets(list(ends))
    for partition, end in ends.items():
        if begins[partition] >= end:
            continue
        # A reader each: one that is given another partition first waits for its long poll of the last (0.5 s).
        reader = await bus.reader()
        try:
            async with aclosing(_partition(reader, partition, begins[partition], end, clock)) as values:
                async for offset, value in values:
                    yield partition, offset, value
        finally:
            await reader.close()


async def _partition(
    reader: Reader, partition: TopicPartition, begin: int, end: int, clock: Clock
) -> AsyncGenerator[tuple[int, bytes | None], None]:
    """Offsets have gaps: the end is known by the reader's position, never by a record's offset."""
    reader.assign({partition: begin})
    position, since = begin, clock.monotonic()
    while position < end:
        fetched = await reader.fetch(timeout_seconds=FETCH_SECONDS, max_records=64)
        for record in fetched.get(partition, ()):
            if record.offset >= end:
                return
            yield record.offset, record.value
        now_at = await reader.position(partition)
        if now_at > position:
            position, since = now_at, clock.monotonic()
        elif clock.monotonic() - since > STALL_SECONDS:
            raise ServiceUnreachable(
                f"evaluating: no validation record came for {STALL_SECONDS:.0f} s",
                hint="is the broker up? `megaflow services status` says so",
                topic=partition.topic,
                partition=partition.partition,
                offset=position,
            )
