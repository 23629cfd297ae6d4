"""Training from Kafka beside the same steps on tensors in memory.

    python benchmarks/training.py                            # on an embedded broker and S3
    python benchmarks/training.py --ranks 1 --pairs 4

Ranks train from Kafka as in a run: loader, plan, exchange, reduction, optimizer. Beside them as many processes hold the
same records decoded and batched in memory, and do the same steps in a bare loop with the same reduction and optimizer.
They take turns, a block of steps each; the others are stopped meanwhile. The loss of every step must be the same in all
bits. Each pair of blocks gives one difference of step times; its first step, that was stopped in the middle, is left
out. The loader's budget is small, so that it fetches during the run, not before. The model is the reference project's.
A block lasts seconds: what is due by the clock (status, the plan's log) falls into the half of the time in which the
ranks run, so that short blocks would show twice of it.
  step time     mean of a block, from the end of one step to the end of the next, so with everything between steps
  outside       the share of it that is not within a step: exchange (the wait for data), flags, reports
Targets: a median difference within 2 %, or no difference within the 95 % interval of the pairs; outside below 1 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import statistics
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

from ranks import (
    HERE,
    TOKENIZER,
    Event,
    Ranks,
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

from megaflow_stream.bus import Bus, TopicPartition
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.training.planlog import read_plan

REFERENCE = HERE.parent / "trainers" / "model_finetune.py"
DEFINITION = """
import time
from pathlib import Path

from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.trainer import CheckpointEvery, Trainer
from megaflow_stream.training import gpt, loader, loop
from megaflow_stream.training.optimizers import BuildAdamW, WarmupConstant
from megaflow_stream.training.rank import emit

count = loop.Rank._count
ends = {{}}


def counted(self, *args):
    ends[self.step] = time.monotonic()
    if self.leader is not None and self.step % BLOCK == 0:
        emit("ended", dict(ends={{str(step): at for step, at in ends.items()}}))
        ends.clear()
    count(self, *args)


loop.Rank._count = counted
loader.Loader.__init__.__kwdefaults__["budget_bytes"] = BUDGET


trainer = Trainer(
    name={name!r},
    data={data!r},
    validation={data!r} + ".validation",
    tokenizer="tokenizer.json",
    build_model=definitions(Path("REFERENCE"), Trainer)[0].build_model,
    build_optimizer=BuildAdamW(learning_rate=1e-3),
    build_schedule=WarmupConstant(warmup_steps=10),
    loss=gpt.loss,
    block_tokens=TOKENS,
    micro_slice=SLICE,
    global_batch=BATCH,
    rank_timeout_seconds=300.0,
    checkpoint=CheckpointEvery(steps=10**9),
)
"""


class Turns:
    """Lets the ranks run for a block of steps, then stops them."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.ends: dict[int, float] = {}
        self.steps: dict[int, Event] = {}
        self.cpu: dict[int, float] = {}
        self.done = asyncio.Event()
        self.pids: list[int] = []

    def note(self, event: Event, at: float) -> None:
        if event["event"] == "ended":
            self.ends |= {int(step): at for step, at in event["ends"].items()}  # by the rank's clock
        if event["event"] != "step":
            return
        step = event["step"]
        self.steps[step] = event
        if step % self.block == 0:
            processes = rank_processes()
            self.pids = [p.pid for p in processes]
            for pid in self.pids:
                os.kill(pid, signal.SIGSTOP)
            self.cpu[step] = cpu_seconds(processes)
            self.done.set()

    def go_on(self) -> None:
        self.done.clear()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def start_memory(args: argparse.Namespace, group: Ranks, definition: Path) -> list[Process]:
    """The processes with the records in memory, which have read the whole topic when this returns."""
    port = group.folder / f"port-{uuid.uuid4().hex}"
    processes = []
    for rank in range(group.count):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / "training_memory.py"),
            *(str(definition), group.name, group.services.bootstrap_servers, str(rank), str(group.count), str(port)),
            stdin=PIPE,
            stdout=PIPE,
            limit=1 << 22,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        processes.append(process)
    for process in processes:
        await answer(process)
    return processes


async def answer(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise SystemExit("a process with the records in memory ended")
    found: dict[str, Any] = json.loads(line)
    return found


async def ask(processes: list[Process], lines: bytes) -> list[dict[str, Any]]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(lines)
        await process.stdin.drain()
    return [await answer(process) for process in processes]


async def pairs(args: argparse.Namespace, group: Ranks, bus: Bus, turns: Turns) -> list[dict[str, float]]:
    """One row a pair of blocks, after one that warms up."""
    plan = TopicPartition(f"plan.{group.name}", 0)
    running = asyncio.create_task(group.run(bus))
    ended = asyncio.create_task(turns.done.wait())
    memory: list[Process] = []
    rows: list[dict[str, float]] = []
    cursor = None
    try:
        memory = await start_memory(args, group, await definition_of(group))
        for turn in range(args.pairs + 1):
            await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
                raise SystemExit("the ranks ended before the last pair")
            first, last = turn * args.block + 1, (turn + 1) * args.block
            logged = [one for one in await read_plan(bus, plan.topic, cursor) if first <= one.entry.step <= last]
            cursor = logged[-1].offset + 1
            lines = b"".join(one.entry.to_json() + b"\n" for one in logged) + b"\n"
            answers = await ask(memory, lines)
            losses = [turns.steps[step]["loss"] for step in range(first, last + 1)]
            assert losses == answers[0]["losses"], "the two do not do the same steps"
            if turn:
                whole = turns.ends[last] - turns.ends[first]
                inside = sum(turns.steps[step]["step_seconds"] for step in range(first + 1, last + 1))
                kafka, beside = whole / (args.block - 1), max(sum(a["seconds"][1:]) for a in answers) / (args.block - 1)
                rows.append(
                    {
                        "kafka": kafka,
                        "memory": beside,
                        "difference": kafka / beside - 1,
                        "outside": 1 - inside / whole,
                        "kafka_cpu": (turns.cpu[last] - turns.cpu[last - args.block]) / args.block,
                        "memory_cpu": sum(a["cpu"] for a in answers) / args.block,
                    }
                )
                print(
                    f"{group.count} ranks, pair {turn}: {kafka * 1e3:7.1f} ms from Kafka, {beside * 1e3:7.1f} ms in "
                    f"memory: {rows[-1]['difference']:+.1%}, {rows[-1]['outside']:.2%} outside of steps",
                    file=sys.stderr,
                )
            turns.go_on()
            ended = asyncio.create_task(turns.done.wait())
        await running
    finally:
        turns.go_on()
        ended.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
        for process in memory:
            process.kill()
            await process.wait()
    return rows


async def definition_of(group: Ranks) -> Path:
    """The file, once the ranks' launcher has it written."""
    path = group.folder / f"{group.name}.py"
    while not path.exists():
        await asyncio.sleep(0.05)
    return path


async def measure(args: argparse.Namespace) -> dict[str, object]:
    systems: dict[str, object] = {}
    with workplace() as folder:
        (folder / "tokenizer.json").write_bytes(TOKENIZER)
        async with services(args, folder) as found:
            bus = await opened(found)
            topic = f"bench.features.{uuid.uuid4().hex[:8]}"
            steps = (args.pairs + 1) * args.block
            vocabulary = definitions(REFERENCE, Trainer)[0].vocabulary
            assert vocabulary is not None
            # Half as many again, so that the loader has what to fetch to the end.
            size = await fill(bus, topic, steps * args.batch * max(args.ranks) * 3 // 2, args.tokens, vocabulary)
            text = DEFINITION
            for name, value in (
                ("TOKENS", args.tokens),
                ("SLICE", args.micro_slice),
                ("BUDGET", args.budget_bytes),
                ("BLOCK", args.block),
                ("REFERENCE", REFERENCE),
            ):
                text = text.replace(name, str(value))
            for count in args.ranks:
                turns = Turns(args.block)
                batch = str(args.batch * count)
                group = Ranks(found, folder, topic, text.replace("BATCH", batch), count, steps, turns.note)
                systems[f"{count} rank{'s' * (count > 1)}"] = summary(await pairs(args, group, bus, turns), group)
            await bus.delete_topic(topic)
            await bus.close()
    return {
        "tokens_per_step_and_rank": args.batch * args.tokens,
        "bytes_per_step_and_rank": round(size / (steps * max(args.ranks) * 3 // 2)),
        "pairs": args.pairs,
        "steps_per_block": args.block,
        "systems": systems,
        "targets": {"difference": 0.02, "outside": 0.01, "steps_per_second": 5.0},
        "machine": machine(),
    }


def summary(rows: list[dict[str, float]], group: Ranks) -> dict[str, object]:
    differences = [row["difference"] for row in rows]
    middle = statistics.mean(differences)
    # Student's t at 95 %, two-sided, by its expansion in 1/n; good to 1 % from 4 pairs on.
    n = len(rows) - 1
    t = 1.96 + 2.372 / max(1, n) + 2.822 / max(1, n) ** 2 + 2.556 / max(1, n) ** 3
    half = t * statistics.stdev(differences) / math.sqrt(len(rows)) if n else math.inf
    return {
        "kafka_step_seconds": spread([row["kafka"] for row in rows], 4),
        "memory_step_seconds": spread([row["memory"] for row in rows], 4),
        "difference": spread(differences, 4),
        "interval": [round(middle - half, 4), round(middle + half, 4)],
        "outside": spread([row["outside"] for row in rows], 5),
        "data_wait": group.named("stopped")[0]["data_wait"],
        "kafka_cpu_seconds_per_step": spread([row["kafka_cpu"] for row in rows], 4),
        "memory_cpu_seconds_per_step": spread([row["memory_cpu"] for row in rows], 4),
        "steps_per_second": round(1 / statistics.median(row["kafka"] for row in rows), 2),
        "met": {
            "difference": statistics.median(differences) <= 0.02 or middle - half <= 0.0,
            "outside": statistics.median(row["outside"] for row in rows) < 0.01,
        },
    }


def show(found: dict[str, Any]) -> None:
    print("| ranks | steps/s | Kafka, ms | memory, ms | difference (target 2 %) | 95 % interval | outside (1 %) |")
    print("|---|---|---|---|---|---|---|")
    for name, row in found["systems"].items():
        cells = [f"{row['steps_per_second']}"]
        for side in ("kafka", "memory"):
            cells.append(shown({k: round(v * 1e3, 1) for k, v in row[f"{side}_step_seconds"].items()}))
        cells.append(shown({k: round(v * 100, 2) for k, v in row["difference"].items()}, " %"))
        cells.append(" to ".join(f"{100 * edge:+.2f} %" for edge in row["interval"]))
        cells.append(shown({k: round(v * 100, 2) for k, v in row["outside"].items()}, " %"))
        print(f"| {name} | " + " | ".join(cells) + " |")
        cpu = [shown(row[f"{side}_cpu_seconds_per_step"], " s") for side in ("kafka", "memory")]
        print(f"{name}: CPU a step {cpu[0]} from Kafka, {cpu[1]} in memory; met: {row['met']}", file=sys.stderr)
    print({k: v for k, v in found.items() if k not in ("systems", "targets")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block", type=int, default=30, help="steps of a block")
    parser.add_argument("--tokens", type=int, default=256, help="of a packed sequence")
    parser.add_argument("--batch", type=int, default=3, help="packed sequences of a step, for each rank")
    parser.add_argument("--micro-slice", type=int, default=3)
    parser.add_argument("--budget-bytes", type=int, default=1 << 18, help="what a rank's loader reads ahead")
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    print(json.dumps(found)) if args.json else show(found)


if __name__ == "__main__":
    main()
