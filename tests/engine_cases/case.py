"""Input with a known answer, and the check of every record of what came out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from megaflow_stream.bus.api import Bus, Record, TopicDescription, TopicPartition


@dataclass
class Case:
    """Topics PREFIX.in, .out, .dlq, .dropped, .state, .statistics, and what was put into the first."""

    prefix: str
    partitions: int
    made: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)

    async def create(self, bus: Bus) -> None:
        for name in ("in", "out", "dlq", "dropped", "state", "statistics"):
            await bus.create_topic(TopicDescription(f"{self.prefix}.{name}", self.partitions))

    async def load(
        self, bus: Bus, count: int, *, seed: int = 0, special: Mapping[int, str] | None = None, repeats: float = 0.03
    ) -> None:
        """`count` records in transactions, a fifth of them aborted (then sent again); some repeat an earlier body."""
        rng, special = random.Random(seed), special or {}
        producer = await bus.producer(f"load-{self.prefix}-{seed}")
        n = sum(len(rows) for rows in self.made.values())
        end = n + count
        while n < end:
            abort = rng.random() < 0.2
            await producer.begin()
            sent = []
            for number in range(n, min(n + rng.randint(1, 800), end)):
                partition = number % self.partitions
                body = special.get(number, "") + f"{number}/{rng.random()}" + "x" * rng.randint(0, 200)
                earlier = [row for row in self.made.get(partition, [])[-50:] if row[1] not in special]
                if earlier and number not in special and rng.random() < repeats:
                    body = rng.choice(earlier)[2]
                future = await producer.send(
                    f"{self.prefix}.in",
                    orjson.dumps({"n": number, "body": body}),
                    key=hashlib.blake2b(body.encode(), digest_size=16).digest(),
                    partition=partition,
                    headers=[("conversation", str(number).encode())],
                )
                sent.append((partition, future, number, body))
            if abort:
                await producer.abort()
                continue
            await producer.commit([future for _, future, _, _ in sent])
            for partition, future, number, body in sent:
                self.made.setdefault(partition, []).append((future.result(), number, body))
            n = sent[-1][2] + 1
        await producer.close()

    async def done(self, bus: Bus, group: str) -> bool:
        """Whether the group's committed offsets have reached the ends: past the markers too."""
        committed = await bus.committed(group)
        ends = await bus.end_offsets(await bus.partitions(f"{self.prefix}.in"))
        return all(committed.get(tp, 0) >= end for tp, end in ends.items())

    async def problems(self, bus: Bus, *, dedup: bool) -> list[str]:
        """Nothing when every input is in the output once and in order, or a repeat, a drop, or a dead letter."""
        found: list[str] = []
        out, dead, dropped, state = [
            await everything(bus, f"{self.prefix}.{name}") for name in ("out", "dlq", "dropped", "state")
        ]
        for partition, rows in self.made.items():
            expected, letters, drops, seen = [], [], [], set()
            for offset, n, body in rows:
                key = hashlib.blake2b(body.encode(), digest_size=16).digest()
                if body.startswith(("HANG", "RAISE", "DIE", "REJECT")):
                    letters.append(offset)
                elif dedup and key in seen:
                    drops.append((offset, "duplicate"))
                elif body.startswith("DROP"):
                    drops.append((offset, "asked"))
                else:
                    expected.append((offset, n))
                if not body.startswith(("HANG", "RAISE", "DIE", "REJECT")):
                    seen.add(key)
            got = [(v["offset"], v["n"]) for v in map(_json, out[partition])]
            if got != expected:
                found.append(
                    f"partition {partition}: {len(got)} out, {len(expected)} expected, "
                    f"missing {sorted(set(expected) - set(got))[:5]}, extra {sorted(set(got) - set(expected))[:5]}, "
                    f"doubled {len(got) - len(set(got))}, in order {got == sorted(got)}"
                )
            origins = [int(dict(r.headers)["origin-offset"]) for r in dead[partition]]
            if origins != letters:
                found.append(f"partition {partition}: dead letters {origins}, expected {letters}")
            reasons = sorted((v["offset"], v["reason"]) for v in map(_json, dropped[partition]))
            if reasons != sorted(drops):
                found.append(f"partition {partition}: {len(reasons)} drops, expected {len(drops)}")
            if dedup:
                keys = [r.value[at : at + 16] for r in state[partition] for at in range(0, len(r.value or b""), 24)]
                if len(keys) != len(set(keys)) or set(keys) != seen:
                    found.append(f"partition {partition}: state of {len(keys)}, expected {len(seen)}")
        return found


def _json(record: Record) -> dict[str, object]:
    value: dict[str, object] = orjson.loads(record.value or b"")
    return value


async def everything(bus: Bus, topic: str) -> dict[int, list[Record]]:
    """All readable records of a topic, by partition."""
    partitions = await bus.partitions(topic)
    ends = await bus.end_offsets(partitions)
    begins = await bus.begin_offsets(partitions)
    got: dict[int, list[Record]] = {tp.partition: [] for tp in partitions}
    left = [tp for tp in partitions if begins[tp] < ends[tp]]
    if not left:
        return got
    reader = await bus.reader(partition_fetch_bytes=8 << 20)
    try:
        reader.assign({tp: begins[tp] for tp in left})
        while any([await reader.position(tp) < ends[tp] for tp in left]):
            for tp, records in (await reader.fetch(timeout_seconds=0.05)).items():
                got[TopicPartition(*tp).partition] += records
    finally:
        await reader.close()
    return got
