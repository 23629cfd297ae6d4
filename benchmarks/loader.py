"""How fast the loader hands records to ranks that do nothing with them, beside a bare aiokafka consumer.

    python benchmarks/loader.py                                   # on an embedded broker and S3
    python benchmarks/loader.py --ranks 2 --records 20000 --rounds 1

One topic of 4 partitions, packed sequences of 2,048 tokens in transactions. Runs are interleaved, all of them read it
from its beginning to its end:
  raw            one bare consumer, read_committed: assign, getmany, bytes counted, nothing decoded
  N ranks        the product's ranks, plan, exchange, reduction, with records handed to a step that only counts them
  N ranks, batch the same with every record decoded and put into micro-batches, as for a model (with `--batches`)
A step is 1,024 sequences, two million tokens, as large models are trained with. A null step is nothing but its own cost
(plan, reduction, events), so with `--global-batch 256` that weighs four times as much: at the rate of a bare consumer
it would be 200 steps/s. The ranks keep freed memory (`megaflow_stream/allocator.py`), the bare consumer is as it comes.
A run lasts from the ranks' start, with connecting and the first plan in it (raw: from assign), to the last record
trained. MB are of record values. Ranks, their launcher and the broker share the machine's cores. `fetched` is what
came in by the ranks' sockets of Kafka and S3, protocol and all, per byte of values that was trained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import struct
import subprocess
import sys
import uuid
from pathlib import Path

from ranks import (
    HERE,
    Event,
    Ranks,
    Services,
    add_arguments,
    cpu_seconds,
    fill,
    machine,
    opened,
    rank_processes,
    services,
    shown,
    spread,
    workplace,
)

from megaflow_stream.bus import Bus

TARGETS = {"of raw": 0.8, "fetched": 1.25}
DEFINITION = """
import sys

sys.path.insert(0, {here!r})

from loader_null import null_trainer

trainer = null_trainer({name!r}, {data!r}, batches=BATCHES, tokens=TOKENS, global_batch=GLOBAL)
"""


def raw(found: Services, topic: str) -> dict[str, float]:
    command = [sys.executable, str(HERE / "loader_raw.py"), found.bootstrap_servers, topic]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result | {"fetched": result["bytes"]}


async def ranks(
    args: argparse.Namespace, found: Services, bus: Bus, folder: Path, topic: str, count: int, batches: bool
) -> dict[str, float]:
    steps = args.records // args.global_batch
    used = {"begin": 0.0, "end": 0.0}
    wire = folder / f"wire-{uuid.uuid4().hex}"
    wire.mkdir()
    os.environ["BENCH_WIRE"] = str(wire)

    def note(event: Event, at: float) -> None:
        if event["event"] == "started":
            used["begin"] = cpu_seconds(rank_processes())
        elif event["event"] == "step" and event["step"] == steps:
            used["end"] = cpu_seconds(rank_processes())

    text = DEFINITION.replace("BATCHES", str(batches)).replace("TOKENS", str(args.tokens))
    group = Ranks(found, folder, topic, text.replace("GLOBAL", str(args.global_batch)), count, steps, note)
    await group.run(bus)
    last = group.named("step")[-1]
    assert last["records"] == steps * args.global_batch, f"{last['records']} records were trained"
    trained = sum(e["trained_bytes"] for e in group.named("rank"))
    received = sum(struct.unpack("<q", file.read_bytes())[0] for file in wire.iterdir())
    return {
        "seconds": last["at"] - group.named("started")[0]["at"],
        "cpu": used["end"] - used["begin"],
        "records": last["records"],
        "bytes": trained,
        "fetched": received,
        "shipped": sum(e["shipped_bytes"] for e in group.named("rank")) / trained,
    }


async def measure(args: argparse.Namespace) -> dict[str, object]:
    with workplace() as folder:
        async with services(args, folder) as found:
            bus = await opened(found)
            topic = f"bench.features.{uuid.uuid4().hex[:8]}"
            args.records -= args.records % args.global_batch
            size = await fill(bus, topic, args.records, args.tokens, 16_384)
            kinds = ("", ", batches") if args.batches else ("",)
            names = ["raw"] + [f"{n} rank{'s' * (n > 1)}{kind}" for kind in kinds for n in args.ranks]
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            await asyncio.to_thread(raw, found, topic)  # the broker warms up
            for turn in range(args.rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    if name == "raw":
                        result = await asyncio.to_thread(raw, found, topic)
                    else:
                        count = int(name.split()[0])
                        result = await ranks(args, found, bus, folder, topic, count, name.endswith("batches"))
                    assert result["bytes"] == size, f"{name} read {result['bytes']} bytes of {size}"
                    runs[name].append(result)
                    rate = size / result["seconds"] / 1e6
                    print(f"round {turn + 1}: {name:16} {rate:7.1f} MB/s, CPU {result['cpu']:.2f} s", file=sys.stderr)
            await bus.delete_topic(topic)
            await bus.close()
    return table(args, runs, size)


def table(args: argparse.Namespace, runs: dict[str, list[dict[str, float]]], size: int) -> dict[str, object]:
    systems = {}
    for name, done in runs.items():
        systems[name] = {
            "megabytes_per_second": spread([size / run["seconds"] / 1e6 for run in done], 1),
            "tokens_per_second": spread([run["records"] * args.tokens / run["seconds"] for run in done], 0),
            "of_raw": spread([r["seconds"] / run["seconds"] for r, run in zip(runs["raw"], done, strict=True)]),
            "fetched_per_trained": spread([run["fetched"] / run["bytes"] for run in done]),
            "shipped_per_trained": spread([run.get("shipped", 0.0) for run in done]),
            "cpu_seconds": spread([run["cpu"] for run in done], 2),
        }
    return {
        "records": args.records,
        "bytes_per_record": round(size / args.records),
        "tokens_per_record": args.tokens,
        "global_batch": args.global_batch,
        "rounds": args.rounds,
        "systems": systems,
        "targets": TARGETS,
        "machine": machine(),
    }


def show(found: dict[str, object]) -> None:
    print("| run | MB/s | M tokens/s | of raw (target 0.8) | fetched per trained (target 1.25) | CPU s |")
    print("|---|---|---|---|---|---|")
    for name, row in found["systems"].items():  # type: ignore[attr-defined]
        tokens = {k: round(v / 1e6, 2) for k, v in row["tokens_per_second"].items()}
        cells = (row["megabytes_per_second"], tokens, row["of_raw"], row["fetched_per_trained"], row["cpu_seconds"])
        print(f"| {name} | " + " | ".join(shown(cell) for cell in cells) + " |")
    print({k: v for k, v in found.items() if k not in ("systems", "targets")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--records", type=int, default=240_000)
    parser.add_argument("--tokens", type=int, default=2048, help="of a packed sequence")
    parser.add_argument("--global-batch", type=int, default=1024, help="packed sequences of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", action="store_true", help="also runs that decode every record")
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    print(json.dumps(found)) if args.json else show(found)


if __name__ == "__main__":
    main()
