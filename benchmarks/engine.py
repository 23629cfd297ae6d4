"""The engine beside the loop in memory, beside itself without transactions, and beside its peers.

    python benchmarks/engine.py                              # ours, on an embedded broker
    python benchmarks/engine.py --peers ../shared/bench/streaming --systems b-batch g f h-faststream c

Work: decode JSON, clean text, mask, four features, encode; 4 partitions, records of about 1.3 kB. A run lasts from the
first partition in hand to the moment the group's committed offsets reach the end. Runs are interleaved; the table has
medians, spread, and CPU seconds of worker, compute process and broker, since a shared machine's wall time says little.
Peers run by their own runner in the same rounds; each needs its packages (see that folder's README).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil

from megaflow_stream.bus import Bus, OutRecord, TopicDescription, connect
from megaflow_stream.conversations import synthetic

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
CASES = {
    "memory, python": None,
    "memory, columns": None,
    "arrow, transactions": ("arrow", "transactions"),
    "arrow, plain": ("arrow", "plain"),
    "json, transactions": ("json", "transactions"),
    "json, plain": ("json", "plain"),
}
RATIOS = (  # of, over, target
    ("arrow, transactions", "arrow, plain", 0.9),
    ("arrow, transactions", "memory, python", 1.0),
    ("arrow, transactions", "memory, columns", 0.75),
    ("json, transactions", "memory, python", 0.65),
)


def make(path: Path, count: int, data: Path | None, peers: Path | None) -> None:
    """Records of one turn or a few, about 1.3 kB: of real conversations by the peers' maker, else synthetic."""
    if data is not None and peers is not None:
        subprocess.run(
            [sys.executable, peers / "make_data.py", data, path, "--records", str(count)], check=True, stdout=2
        )
        return
    with path.open("wb") as file:
        number = 0
        for document in synthetic.documents(count, seed=7):
            text = orjson.dumps(document).decode()
            for at in range(0, len(text), 1300):
                key = f"r{number:08d}"
                record = {"id": key, "role": "user", "content": text[at : at + 1300]}
                value = orjson.dumps(record)
                file.write(struct.pack("<II", len(key), len(value)) + key.encode() + value)
                number += 1
                if number == count:
                    return


def records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    with path.open("rb") as file:
        while head := file.read(8):
            key, value = struct.unpack("<II", head)
            yield file.read(key), file.read(value)


async def load(bus: Bus, path: Path) -> None:
    """Record i on partition i modulo 4, as the peers' loader does."""
    for topic in ("bench.raw", "bench.dlq", "bench.dropped", "bench.statistics"):
        await bus.create_topic(TopicDescription(topic, 4, {"max.message.bytes": str(1 << 25)}))
    if sum((await bus.end_offsets(await bus.partitions("bench.raw"))).values()):
        return
    producer = await bus.producer()
    rows: list[list[OutRecord]] = [[], [], [], []]
    for number, (key, value) in enumerate(records(path)):
        rows[number % 4].append(OutRecord(value, key))
    for partition, part in enumerate(rows):
        for at in range(0, len(part), 5000):
            await asyncio.gather(*await producer.send_many("bench.raw", partition, part[at : at + 5000]))
    await producer.close()


def memory(path: Path, by_columns: bool) -> dict[str, float]:
    """The work in a loop over bytes in memory, one core."""
    from engine_work import columns, one

    from megaflow_stream.processing.frames import encode_batch

    values = [value for _, value in records(path)]
    begun, used = time.perf_counter(), time.process_time()
    if by_columns:
        for at in range(0, len(values), 2000):
            encode_batch(columns(values[at : at + 2000]))
    else:
        for value in values:
            one(value)
    return {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - used, "broker_cpu": 0.0}


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
    return total


async def engine(bus: Bus, broker: str, case: str, mode: str, broker_pid: int) -> dict[str, float]:
    """One worker, from its first partition to the last commit."""
    out = f"bench.out.{os.urandom(4).hex()}"
    await bus.create_topic(TopicDescription(out, 4, {"max.message.bytes": str(1 << 25)}))
    ends = await bus.end_offsets(await bus.partitions("bench.raw"))
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_worker.py"), broker, case, mode],
            stderr=log,
            stdout=log,
            env={**os.environ, "BENCH_OUT": out},
        )
        try:
            begun = 0.0
            while True:
                await asyncio.sleep(0.03)
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"the worker ended: {log.read().decode()[-2000:]}")
                if not begun:
                    if b"from offset" in os.pread(log.fileno(), 1 << 16, 0):
                        begun, used, broker_used = (
                            time.perf_counter(),
                            cpu_seconds(process.pid),
                            cpu_seconds(broker_pid),
                        )
                    continue
                committed = await bus.committed(f"megaflow.process.{out}-{case}")
                if all(committed.get(tp, 0) >= end for tp, end in ends.items()):
                    break
            result = {
                "seconds": time.perf_counter() - begun,
                "cpu": cpu_seconds(process.pid) - used,
                "broker_cpu": cpu_seconds(broker_pid) - broker_used,
            }
        finally:
            process.terminate()
            process.wait(30)
    await bus.delete_topic(out)
    return result


def peer(name: str, args: argparse.Namespace, path: Path, broker_pid: int) -> dict[str, float]:
    """One run of a peer by its own runner: its result line, every output record checked by it."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as results:
        subprocess.run(
            [sys.executable, args.peers / "run.py", name, "--broker", args.bootstrap_servers, "--results", results.name]
            + ["--expected", str(path.with_suffix(".expected"))],
            check=True,
            stdout=2,
            cwd=args.peers,
            env={**os.environ, "BENCH_RECORDS": str(path), "BENCH_BROKER_PID": str(broker_pid)},
        )
        result = json.loads(Path(results.name).read_text().splitlines()[-1])
    if "error" in result:
        raise SystemExit(f"{name}: {result['error']}: {result.get('log_tail')}")
    return {"seconds": result["seconds"], "cpu": result["cpu"], "broker_cpu": result.get("broker_cpu", 0.0)}


async def measure(args: argparse.Namespace, path: Path, broker_pid: int) -> dict[str, list[dict[str, float]]]:
    bus = await connect(args.bootstrap_servers)
    await load(bus, path)
    if args.systems:  # their loop in memory also writes what every other's output is checked against
        await asyncio.to_thread(peer, "a", args, path, broker_pid)
    # A young broker compiles its code for transactions while it runs them: two CPU seconds that are nobody's.
    await engine(bus, args.bootstrap_servers, "arrow", "transactions", broker_pid)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in (*CASES, *args.systems)}
    for turn in range(args.rounds):
        names = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
        for name in names:
            if name in args.systems:
                result = await asyncio.to_thread(peer, name, args, path, broker_pid)
            elif (case := CASES[name]) is None:
                result = await asyncio.to_thread(memory, path, name.endswith("columns"))
            else:
                result = await engine(bus, args.bootstrap_servers, *case, broker_pid)
            runs[name].append(result)
            print(f"round {turn + 1}: {name:20} {args.records / result['seconds']:9,.0f} records/s", file=sys.stderr)
    await bus.close()
    return runs


def table(runs: dict[str, list[dict[str, float]]], count: int) -> dict[str, object]:
    rates = {name: [count / run["seconds"] for run in done] for name, done in runs.items()}
    systems = {
        name: {
            "records_per_second": round(statistics.median(rates[name])),
            "least": round(min(rates[name])),
            "most": round(max(rates[name])),
            "cpu_seconds": round(statistics.median(run["cpu"] for run in done), 2),
            "broker_cpu_seconds": round(statistics.median(run["broker_cpu"] for run in done), 2),
        }
        for name, done in runs.items()
    }
    ratios = {
        f"{of} / {over}": {
            "ratio": round(statistics.median(a / b for a, b in zip(rates[of], rates[over], strict=True)), 3),
            "least": round(min(a / b for a, b in zip(rates[of], rates[over], strict=True)), 3),
            "most": round(max(a / b for a, b in zip(rates[of], rates[over], strict=True)), 3),
            "target": target,
        }
        for of, over, target in RATIOS
    }
    return {"records": count, "systems": systems, "ratios": ratios}


def show(found: dict[str, object]) -> None:
    print("| system | records/s | least | most | CPU s | broker CPU s |\n|---|---|---|---|---|---|")
    for name, row in found["systems"].items():  # type: ignore[attr-defined]
        print(f"| {name} | " + " | ".join(f"{value:,}" for value in row.values()) + " |")
    for name, row in found["ratios"].items():  # type: ignore[attr-defined]
        print(f"{name}: {row['ratio']} ({row['least']} to {row['most']}), target {row['target']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", default="", help="an existing broker without credentials")
    parser.add_argument("--broker-pid", type=int, default=0, help="for its CPU seconds")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="a folder of real conversations; needs --peers")
    parser.add_argument("--peers", type=Path, help="the folder of the peers and their runner")
    parser.add_argument("--systems", nargs="*", default=[], help="peers to run, by the runner's names")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.peers = args.peers.resolve() if args.peers else None
    with tempfile.TemporaryDirectory() as folder:
        path, services = Path(folder, "records.bin"), Path(folder, "services")
        make(path, args.records, args.data, args.peers)
        broker_pid = args.broker_pid
        if not args.bootstrap_servers:
            from megaflow_stream.runtime.services import up

            found = asyncio.run(up(services, kafka=True, s3=False, authenticate=False))
            args.bootstrap_servers, broker_pid = found.bootstrap_servers, found.pids.get("kafka", 0)
        try:
            result = table(asyncio.run(measure(args, path, broker_pid)), args.records)
        finally:
            if services.exists():
                from megaflow_stream.runtime.services import down

                asyncio.run(down(services))
    print(json.dumps(result)) if args.json else show(result)


if __name__ == "__main__":
    main()
