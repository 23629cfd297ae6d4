"""What checkpoints cost the training thread, memory and CPU, beside a plain copy of the same state.

    python benchmarks/checkpoint.py                             # on an embedded broker and S3
    python benchmarks/checkpoint.py --rounds 1 --steps 60

One rank, of 20 M parameters, which with AdamW's moments are 250 MB of state, trains from Kafka and checkpoints to S3
every 20 steps, all of it changed each time. Right before each checkpoint its process copies the same tensors into a
buffer of the same size that was there before: the plain copy, of the same moment.
  stall        what a checkpoint keeps the training thread: comparing weights, lineage, copying, handing over
  first        the first one's, which also makes the buffer
  total        all stalls over the whole run
  slowed       a step's time while a checkpoint is being stored, over one's while none is
               queue: of such a step, the training thread was ready, but every CPU was taken; blocked: it waited for
               something else, as for the interpreter's lock
  peak memory  of the process, above what it had before its first checkpoint, in sizes of the state
  CPU          of the process's other threads while checkpoints are stored (an embedded S3's own is apart)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import psutil
from ranks import (
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

VOCABULARY = 8192
DEFINITION = """
import sys

sys.path.insert(0, {here!r})

from checkpoint_stall import measure_stalls

from megaflow_stream.definitions.trainer import CheckpointEvery, Trainer
from megaflow_stream.training import gpt
from megaflow_stream.training.optimizers import BuildAdamW

measure_stalls()


def build_model():
    return gpt.GPT(gpt.GPTConfig(vocabulary=8192, layers=10, heads=6, width=384, hidden=1024))


trainer = Trainer(
    name={name!r},
    data={data!r},
    validation={data!r} + ".validation",
    tokenizer="tokenizer.json",
    build_model=build_model,
    build_optimizer=BuildAdamW(learning_rate=1e-4),
    loss=gpt.loss,
    block_tokens=TOKENS,
    micro_slice=BATCH,
    global_batch=BATCH,
    rank_timeout_seconds=120.0,
    checkpoint=CheckpointEvery(steps=EVERY),
)
"""


class Watch:
    """Follows the rank's process: memory all the time, time and CPU by step."""

    def __init__(self, s3_pid: int) -> None:
        self.s3 = [psutil.Process(s3_pid)] if s3_pid else []
        self.rank: psutil.Process | None = None
        self.rss: list[int] = []
        self.before_bytes = 0
        self.others: dict[int, float] = {}
        self.server: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def note(self, event: Event, at: float) -> None:
        if event["event"] == "started":
            self.rank = rank_processes()[0]
            self._thread.start()
        elif event["event"] == "step" and self.rank is not None:
            # torch computes on the process's first thread alone, as it has one.
            times = self.rank.threads()
            self.others[event["step"]] = sum(t.user_time + t.system_time for t in times if t.id != self.rank.pid)
            self.server[event["step"]] = cpu_seconds(self.s3)
        elif event["event"] == "stall" and not self.before_bytes:
            self.before_bytes = event["before_bytes"]

    def _sample(self) -> None:
        assert self.rank is not None
        while not self._ended.wait(0.02):
            try:
                self.rss.append(self.rank.memory_info().rss)
            except psutil.Error:
                return

    def end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()


def figures(group: Ranks, watch: Watch, every: int) -> dict[str, Any]:
    steps, stalls, saved = group.named("step"), group.named("stall"), group.named("checkpoint")
    ends = {e["step"]: e["at"] for e in steps}
    # Saves overlap the steps after them; the last one's end is not among the steps.
    took = {c["step"]: c["save_seconds"] for c in saved}
    windows = [(s["at"], s["at"] + took[s["step"]]) for s in stalls]
    threads = {e["step"]: e for e in group.named("thread")}
    busy, free, waits = [], [], []
    last_step = max(ends)
    for step in range(every // 2, last_step + 1):
        begin, end = ends[step - 1], ends[step]
        if any(begin <= s["at"] <= end for s in stalls):
            continue
        if any(low <= begin and end <= high for low, high in windows):
            busy.append(end - begin)
            before, after = threads[step - 1], threads[step]
            queue = after["queue_seconds"] - before["queue_seconds"]
            waits.append((queue, end - begin - queue - (after["cpu_seconds"] - before["cpu_seconds"])))
        elif all(end <= low or begin >= high for low, high in windows):
            free.append(end - begin)
    whole = ends[last_step] - ends[1] - sum(s["plain_seconds"] for s in stalls)
    first, *rest = stalls
    # From the first checkpoint to before the last, whose upload outlasts the steps.
    inside = [c for c in saved if c["step"] < last_step]
    uploaded = sum(c["uploaded_bytes"] for c in inside) / 1e9
    begin = stalls[0]["step"]
    return {
        "state_megabytes": first["state_bytes"] / 1e6,
        "parameters": first["parameters"],
        "step_seconds": statistics.median(free),
        "steps_free": len(free),
        "steps_busy": len(busy),
        "slowed": statistics.median(busy) / statistics.median(free) if busy else None,
        "queued": statistics.median(queue for queue, _ in waits) if waits else None,
        "blocked": statistics.median(other for _, other in waits) if waits else None,
        "plain": [s["plain_seconds"] for s in stalls],
        "stall": [s["stall_seconds"] for s in rest],
        "ratio": [s["stall_seconds"] / s["plain_seconds"] for s in rest],
        "first": first["stall_seconds"] / first["plain_seconds"],
        "first_seconds": first["stall_seconds"],
        "parts": {part: [s[part] for s in rest] for part in ("digest_seconds", "gather_seconds", "snapshot_seconds")},
        "total": sum(s["stall_seconds"] for s in stalls) / whole,
        "save_seconds": [c["save_seconds"] for c in saved],
        "skipped": group.named("stopped")[0]["checkpoints_skipped"],
        "peak": (max(watch.rss) - watch.before_bytes) / first["state_bytes"],
        "cpu_per_gigabyte": (watch.others[last_step] - watch.others[begin]) / uploaded,
        "server_cpu_per_gigabyte": (watch.server[last_step] - watch.server[begin]) / uploaded,
    }


async def measure(args: argparse.Namespace) -> dict[str, object]:
    runs = []
    with workplace() as folder:
        async with services(args, folder) as found:
            bus = await opened(found)
            topic = f"bench.features.{uuid.uuid4().hex[:8]}"
            await fill(bus, topic, args.steps * args.global_batch, args.tokens, VOCABULARY)
            text = DEFINITION
            for name, value in (("TOKENS", args.tokens), ("BATCH", args.global_batch), ("EVERY", args.every)):
                text = text.replace(name, str(value))
            for turn in range(args.rounds):
                watch = Watch(args.s3_pid or found.pids.get("s3", 0))
                group = Ranks(found, Path(folder), topic, text, 1, args.steps, watch.note)
                try:
                    await group.run(bus)
                finally:
                    watch.end()
                runs.append(figures(group, watch, args.every))
                one = runs[-1]
                print(
                    f"round {turn + 1}: steps of {one['step_seconds']:.3f} s, plain copies "
                    f"{[round(1e3 * v) for v in one['plain']]} ms, stalls {[round(1e3 * v) for v in one['stall']]} ms "
                    f"(the first {1e3 * one['first_seconds']:.0f}), in total {one['total']:.2%}",
                    file=sys.stderr,
                )
            await bus.delete_topic(topic)
            await bus.close()
    return table(args, runs)


def table(args: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, object]:
    def all_of(name: str) -> dict[str, float]:
        return spread([value for run in runs for value in run[name]], 4)

    def each(name: str, digits: int = 3) -> dict[str, float]:
        return spread([run[name] for run in runs if run[name] is not None] or [0.0], digits)

    return {
        "parameters": runs[0]["parameters"],
        "state_megabytes": round(runs[0]["state_megabytes"], 1),
        "steps": args.steps,
        "every": args.every,
        "rounds": args.rounds,
        "step_seconds": each("step_seconds"),
        "plain_copy_seconds": all_of("plain"),
        "stall_seconds": all_of("stall"),
        "stall/plain_copy": all_of("ratio"),
        "first/plain_copy": each("first"),
        "parts": {part: spread([v for run in runs for v in run["parts"][part]], 4) for part in runs[0]["parts"]},
        "total": each("total", 5),
        "slowed": each("slowed"),
        "busy_step_queue_seconds": each("queued"),
        "busy_step_blocked_seconds": each("blocked"),
        "save_seconds": all_of("save_seconds"),
        "skipped": each("skipped", 0),
        "peak_states": each("peak"),
        "cpu_seconds_per_gigabyte": each("cpu_per_gigabyte", 2),
        "server_cpu_seconds_per_gigabyte": each("server_cpu_per_gigabyte", 2),
        "targets": {"stall/plain_copy": 1.5, "total": 0.01},
        "machine": machine(),
    }


def show(found: dict[str, Any]) -> None:
    targets = found["targets"]
    for name, row in found.items():
        if isinstance(row, dict) and "median" in row:
            print(f"{name:34} {shown(row)}{f', target {targets[name]}' if name in targets else ''}")
        elif name == "parts":
            for part, values in row.items():
                print(f"  of it {part:28} {shown(values)}")
        elif name != "targets":
            print(f"{name:34} {row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--s3-pid", type=int, default=0, help="of an existing S3 on this machine, for its CPU seconds")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--tokens", type=int, default=64, help="of a packed sequence")
    parser.add_argument("--global-batch", type=int, default=2, help="packed sequences of a step")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    print(json.dumps(found)) if args.json else show(found)


if __name__ == "__main__":
    main()
