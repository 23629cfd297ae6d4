"""Publishes the conversations of files, once, whatever is interrupted and repeated.

A chunk's records and its entry in the ledger go out in one transaction. A run that is killed leaves chunks that are
done, chunks that are not, and perhaps an open transaction. The next run of the same files on the same host ends that
at once (same transactional id), any other waits until the broker has (`publishing/ledger.py`). Then it reads the ledger
and does the rest. A broker that fails in between is the same thing inside a run.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import BinaryIO

from megaflow_stream.bus.api import Bus
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.conversations.detect import AUTO
from megaflow_stream.conversations.files import STDIN, sources
from megaflow_stream.errors import UsageError
from megaflow_stream.publishing import ledger as ledgers
from megaflow_stream.publishing.ahead import ahead
from megaflow_stream.publishing.ledger import Ledger
from megaflow_stream.publishing.outlet import Outlet
from megaflow_stream.publishing.record import Recorder
from megaflow_stream.publishing.report import Rejects, Report, check_rejects
from megaflow_stream.publishing.run import Run

TOPIC = "conversations.raw"
DEFAULT_MAX_MESSAGE_BYTES = 1048588  # Kafka's own default of max.message.bytes
AHEAD = 2  # steps of `Run.batches`: memory holds a few chunks and two transactions


async def publish(
    bus: Bus | None,
    inputs: Sequence[str | Path],
    *,
    topic: str = TOPIC,
    dataset: str = "agent",
    producer: str = "megaflow",
    format: str = AUTO,
    skip_bad: bool = False,
    rejects: Path | None = None,
    again: bool = False,
    dry_run: bool = False,
    limit_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    progress: Callable[[Report], None] | None = None,
    stdin: BinaryIO | None = None,
    clock: Clock | None = None,
) -> Report:
    """Publishes every good document of `inputs` that no earlier run has published to this topic and dataset.

    bus: None is enough for a dry run, which then knows nothing of earlier runs.
    inputs: files, folders, globs, `-` for standard input.
    format: a dialect, or auto: told by each document's content.
    skip_bad: a bad record does not make the report's exit code 1.
    rejects: a file that takes the bad records, one JSON object a line.
    again: publishes also what the ledger has.
    dry_run: reads and checks everything, sends nothing.
    limit_bytes: the largest record that the topic takes, where there is no bus that could be asked.
    progress: called after each chunk with the report so far.

    Raises `UsageError` for an input that is not there or a `rejects` that cannot be written, `SettingError` for an
    unknown format, `NotFound` for a missing topic, `Fenced` when the same files are published by another process of
    this host, and what the bus raises when it stays away.
    """
    clock = clock or SystemClock()
    started = clock.monotonic()
    found = sources(inputs)
    if rejects is not None:
        check_rejects(rejects, found)
    report = Report(skip_bad=skip_bad, dry_run=dry_run, total_bytes=sum(source.size_bytes for source in found))
    if bus is None and not dry_run:
        raise UsageError("publishing needs a bus")
    if bus is not None:
        limit_bytes = await max_message_bytes(bus, topic)
    recorder = Recorder(dataset=dataset, producer=producer, format=format, max_message_bytes=limit_bytes)
    outlet: Outlet | None = None
    if bus is not None and not dry_run:
        outlet = Outlet(bus, topic, dataset, transactional_id(topic, dataset, inputs))
    try:
        ledger = Ledger(topic, dataset)
        if outlet is not None:
            ledger = await outlet.open()
        elif bus is not None:
            ledger = await ledgers.read(bus, topic, dataset)
        with Rejects(report, rejects) as refused, rare_collections():
            run = Run(report, recorder, ledger, refused, producer=producer, again=again, clock=clock)
            async with aclosing(ahead(run.batches(found, stdin), limit=AHEAD)) as batches:
                async for batch in batches:
                    if batch is not None:
                        if outlet is not None and batch.entries:
                            await outlet.write(batch)
                        report.published += len(batch.records)
                        report.bytes += batch.size_bytes
                    if progress is not None:
                        progress(report)
    finally:
        if outlet is not None:
            await outlet.close()
    report.seconds = clock.monotonic() - started
    if progress is not None:
        progress(report)
    return report


@contextmanager
def rare_collections() -> Iterator[None]:
    """Parsing makes objects by the hundred thousand, none in a cycle, most for a moment: looking for cycles among
    them at Python's own intervals takes a sixth of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(max(100_000, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def transactional_id(topic: str, dataset: str, inputs: Sequence[str | Path]) -> str:
    """The same for the same files of the same host: a repetition ends at once what a killed run left open, and two at
    once cannot both write. Every other run has one of its own: what another host calls /data/in.jsonl, or comes through
    another pipe, is something else, and must not be fenced."""
    named = [os.path.abspath(i) for i in inputs if str(i) != STDIN]
    named = sorted(named) if len(named) == len(inputs) else [os.urandom(16).hex()]
    name = "\0".join([socket.gethostname(), *named])
    source = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return f"megaflow.publish.{topic}.{dataset}.{source}"


async def max_message_bytes(bus: Bus, topic: str) -> int:
    """What a topic takes in a record. Raises `NotFound` where the topic is not there."""
    await bus.partitions(topic)  # says what to do where the topic is not there
    described = (await bus.topics()).get(topic)
    configured = described.configs.get("max.message.bytes") if described is not None else None
    return int(configured) if configured else DEFAULT_MAX_MESSAGE_BYTES
