"""What the benchmarks of training share: services, feature records, ranks as their launcher runs them, figures."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import platform
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from megaflow_stream.bus import Bus, OutRecord, TopicDescription, connect
from megaflow_stream.bus.security import Security
from megaflow_stream.features import record as features
from megaflow_stream.runtime.services import down, up
from megaflow_stream.training.job import Job, S3Address
from megaflow_stream.training.launcher import Event, Launcher

HERE = Path(__file__).parent
TOKENIZER = b'{"a": "tokenizer"}'
BUCKET = "megaflow-benchmarks"
DISTINCT = 512  # packed sequences that are made; a topic repeats them


@dataclass(frozen=True, kw_only=True)
class Services:
    """Where Kafka and S3 are. pids: of embedded ones, for their CPU seconds."""

    bootstrap_servers: str
    endpoint_url: str
    access_key: str
    secret_key: str
    pids: Mapping[str, int] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bootstrap-servers", default="", help="an existing broker without credentials")
    parser.add_argument("--s3-endpoint-url", default="", help="an existing S3: http://KEY:SECRET@HOST:PORT")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")


@contextlib.asynccontextmanager
async def services(args: argparse.Namespace, folder: Path) -> AsyncIterator[Services]:
    """Those that were named; embedded ones for the rest."""
    kafka, url = args.bootstrap_servers, urlsplit(args.s3_endpoint_url)
    state = folder / "services"
    try:
        found = None
        if not kafka or not url.hostname:
            found = await up(state, kafka=not kafka, s3=not url.hostname, authenticate=False)
        yield Services(
            bootstrap_servers=kafka or (found.bootstrap_servers if found else ""),
            endpoint_url=f"{url.scheme}://{url.hostname}:{url.port}"
            if url.hostname
            else found.endpoint_url
            if found
            else "",
            access_key=url.username or (found.access_key if found else ""),
            secret_key=url.password or (found.secret_key if found else ""),
            pids=found.pids if found else {},
        )
    finally:
        if state.exists():
            await down(state)


def sequences(count: int, tokens: int, vocabulary: int, seed: int = 7) -> list[features.PackedSequence]:
    """Packed sequences of a few documents that count up from a random token; a third of the tokens is trained."""
    rng = np.random.default_rng(seed)
    name = hashlib.sha256(TOKENIZER).hexdigest()
    found = []
    for number in range(count):
        documents = int(rng.integers(2, 6))
        inner = np.sort(rng.choice(np.arange(1, tokens), documents - 1, replace=False))
        lengths = np.diff(np.array([0, *inner, tokens])).astype(np.int32)
        mask = rng.random(tokens) < 1 / 3
        mask[[0, *inner]] = False
        ids = rng.integers(0, vocabulary, tokens).astype(np.uint16)
        names = [f"conversation-{number:06d}-{n}" for n in range(documents)]
        found.append(
            features.PackedSequence(tokens=ids, loss_mask=mask, lengths=lengths, conversations=names, tokenizer=name)
        )
    return found


async def fill(bus: Bus, topic: str, records: int, tokens: int, vocabulary: int) -> int:
    """Writes feature records in transactions of 500 over 4 partitions, as the engine does. Returns bytes of values."""
    await bus.create_topic(TopicDescription(topic, 4))
    for name, partitions, configs in (
        ("control", 1, {"cleanup.policy": "compact"}),
        ("status", 1, {"cleanup.policy": "compact"}),
        ("status.events", 1, {}),
        ("checkpoints", 1, {}),
    ):
        await bus.create_topic(TopicDescription(name, partitions, configs))
    while topic not in await bus.topics():
        await asyncio.sleep(0.05)
    made = [
        OutRecord(features.encode(s), None, [(k, v.encode()) for k, v in features.headers(s).items()])
        for s in sequences(min(records, DISTINCT), tokens, vocabulary)
    ]
    producer = await bus.producer(f"bench.{topic}")
    for begin in range(0, records, 500):
        end = min(records, begin + 500)
        await producer.begin()
        sent: list[asyncio.Future[object]] = []
        for partition in range(4):
            part = [made[i % len(made)] for i in range(begin, end) if i % 4 == partition]
            sent += await producer.send_many(topic, partition, part)
        await producer.commit(sent)
    await producer.close()
    return sum(len(made[i % len(made)].value or b"") for i in range(records))


@dataclass
class Ranks:
    """A group of ranks of a definition's text, run by the product's own launcher.

    text: a definition that declares `trainer`; {name}, {data} and {here} in it are filled in.
    on_event(event, at): each event of the ranks with the time it came, of the monotonic clock.
    """

    services: Services
    folder: Path
    data: str
    text: str
    count: int
    until_step: int
    on_event: Callable[[Event, float], None] = lambda event, at: None
    name: str = field(default_factory=lambda: f"bench-{uuid.uuid4().hex[:8]}")
    events: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, bus: Bus) -> list[dict[str, Any]]:
        """To the end of `until_step`. Every event, with "at"."""
        (self.folder / "tokenizer.json").write_bytes(TOKENIZER)
        definition = self.folder / f"{self.name}.py"
        definition.write_text(self.text.format(name=self.name, data=self.data, here=str(HERE)))
        await bus.create_topic(TopicDescription(f"plan.{self.name}", 1))
        job = Job(
            name=self.name,
            definition=definition,
            root=self.folder,
            bootstrap_servers=self.services.bootstrap_servers,
            security=Security(),
            s3=S3Address(
                endpoint_url=self.services.endpoint_url,
                bucket=BUCKET,
                access_key=self.services.access_key,
                secret_key=self.services.secret_key,
            ),
            until_step=self.until_step,
        )

        def note(event: Event) -> None:
            at = time.monotonic()
            if event["event"] == "restart":
                raise SystemExit(f"a rank failed: {event['cause']}")
            self.events.append({**event, "at": at})
            self.on_event(event, at)

        await Launcher(job, job.trainer(), self.count, on_event=note).run()
        await bus.delete_topic(f"plan.{self.name}")
        return self.events

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


def rank_processes() -> list[psutil.Process]:
    """The ranks that this process has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "megaflow_stream.training.rank" in child.cmdline():
                found.append(child)
    return found


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """User and system, so far."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }


def shown(row: Mapping[str, float], unit: str = "") -> str:
    return f"{row['median']:,}{unit} ({row['least']:,} to {row['most']:,})"


def machine() -> dict[str, object]:
    return {"cpus": os.cpu_count(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 2)}


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        yield Path(folder)


async def opened(found: Services) -> Bus:
    return await connect(found.bootstrap_servers)
