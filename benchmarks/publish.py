"""What publishing costs beside a bare producer: `megaflow publish`'s work against aiokafka on the same records.

    python benchmarks/publish.py                                      # on an embedded broker
    python benchmarks/publish.py --bootstrap-servers 127.0.0.1:9092

Runs are paired and interleaved, each on a new topic of four partitions:
  publish   files to records: read, told apart, parsed to the canonical form, hashed, in transactions with the ledger
  parsing   a bare aiokafka producer that reads the same file, parses each line as JSON and sends it under its id
  sending   a bare aiokafka producer that has keys and values in memory
Idempotent, acks=all, batches of 128 KiB for all. The target is half of a bare producer's rate on the same parsed
records, which is `parsing`; `sending` shows what is left above it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
from aiokafka import AIOKafkaProducer

from megaflow_stream.bus import Bus, TopicDescription, connect
from megaflow_stream.conversations import synthetic
from megaflow_stream.publishing import ledger
from megaflow_stream.publishing.publish import publish
from megaflow_stream.runtime.services import down, up

Run = Callable[[Bus, str, str, Path], Awaitable[int]]


async def published(bus: Bus, servers: str, topic: str, path: Path) -> int:
    return (await publish(bus, [path], topic=topic, dataset="bench")).published


async def parsing(bus: Bus, servers: str, topic: str, path: Path) -> int:
    count = 0
    async with producer(servers) as bare:
        with open(path, "rb") as lines:
            for line in lines:
                value = line.rstrip(b"\n")
                await bare.send(topic, value, key=orjson.loads(value)["id"].encode())
                count += 1
    return count


async def sending(bus: Bus, servers: str, topic: str, path: Path) -> int:
    global _records
    if not _records:
        _records = [(orjson.loads(line)["id"].encode(), line) for line in path.read_bytes().splitlines()]
    async with producer(servers) as bare:
        for key, value in _records:
            await bare.send(topic, value, key=key)
    return len(_records)


_records: list[tuple[bytes, bytes]] = []


def producer(servers: str) -> AIOKafkaProducer:
    """With the same batches as the product's."""
    return AIOKafkaProducer(
        bootstrap_servers=servers, enable_idempotence=True, acks="all", max_batch_size=1 << 17, linger_ms=5
    )


RUNS: dict[str, Run] = {"publish": published, "parsing": parsing, "sending": sending}


async def measure(servers: str, count: int, rounds: int) -> dict[str, object]:
    """Medians, spread (least and most) and CPU seconds of every system, and the ratios round by round."""
    rates: dict[str, list[float]] = {name: [] for name in RUNS}
    cpu: dict[str, list[float]] = {name: [] for name in RUNS}
    bus = await connect(servers)
    await bus.create_topic(TopicDescription(ledger.TOPIC, 1, {"cleanup.policy": "compact"}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "records.jsonl")
        with open(path, "wb") as file:
            for document in synthetic.documents(count, seed=1):
                file.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
        size = path.stat().st_size
        for turn in range(rounds + 1):  # the first one warms up
            names = list(RUNS)[turn % len(RUNS) :] + list(RUNS)[: turn % len(RUNS)]
            for name in names:
                topic = f"bench-publish-{os.urandom(4).hex()}"
                await bus.create_topic(TopicDescription(topic, 4))
                await bus.end_offsets(await bus.partitions(topic))
                gc.collect()
                started, used = time.monotonic(), time.process_time()
                sent = await RUNS[name](bus, servers, topic, path)
                seconds, used = time.monotonic() - started, time.process_time() - used
                assert sent == count, f"{name} sent {sent} of {count}"
                if turn:
                    rates[name].append(count / seconds)
                    cpu[name].append(used)
                    print(f"round {turn}: {name:8} {count / seconds:9,.0f} records/s", file=sys.stderr)
                await bus.delete_topic(topic)
    await bus.close()
    systems = {
        name: {
            "records_per_second": round(statistics.median(rates[name])),
            "least": round(min(rates[name])),
            "most": round(max(rates[name])),
            "megabytes_per_second": round(statistics.median(rates[name]) * size / count / 1e6, 1),
            "cpu_seconds": round(statistics.median(cpu[name]), 3),
            "cpu_us_per_record": round(statistics.median(cpu[name]) / count * 1e6, 1),
        }
        for name in RUNS
    }
    ratios = {
        f"publish/{name}": ratio([p / q for p, q in zip(rates["publish"], rates[name], strict=True)])
        for name in ("parsing", "sending")
    }
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    return {
        "records": count,
        "bytes_per_record": round(size / count),
        "rounds": rounds,
        "systems": systems,
        "ratios": ratios,
        "target": {"publish/parsing": 0.5},
        "machine": machine,
    }


def ratio(values: list[float]) -> dict[str, float]:
    """Of pairs of the same round."""
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", default="", help="an existing broker without credentials")
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        servers = options.bootstrap_servers
        if not servers:
            servers = asyncio.run(up(Path(folder), kafka=True, s3=False, authenticate=False)).bootstrap_servers
        try:
            found = asyncio.run(measure(servers, options.records, options.rounds))
        finally:
            if not options.bootstrap_servers:
                asyncio.run(down(Path(folder)))
    if options.json:
        print(json.dumps(found))
        return
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
