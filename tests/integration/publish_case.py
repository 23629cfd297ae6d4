"""What the tests of publishing share: a topic of the test's own on either bus, its records, and files to publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from megaflow_stream.bus import Bus, Record
from megaflow_stream.conversations import synthetic
from megaflow_stream.publishing.publish import publish
from megaflow_stream.publishing.report import Report
from megaflow_stream.testing import MemoryCluster


@dataclass(kw_only=True)
class Place:
    """A bus and a topic of the test's own on it."""

    bus: Bus
    topic: str
    cluster: MemoryCluster | None = None

    async def publish(self, *inputs: Path, **options: Any) -> Report:
        return await publish(self.bus, inputs, topic=self.topic, **options)

    async def records(self) -> list[Record]:
        """Everything that a reader of committed records sees."""
        return await read_all(self.bus, self.topic)

    async def values(self) -> Counter[bytes]:
        return Counter(record.value or b"" for record in await self.records())


async def read_all(bus: Bus, topic: str) -> list[Record]:
    partitions = await bus.partitions(topic)
    ends = await bus.end_offsets(partitions)
    begins = await bus.begin_offsets(partitions)
    wanted = {p for p in partitions if ends[p] > begins[p]}
    found: list[Record] = []
    reader = await bus.reader()
    try:
        if wanted:
            reader.assign({p: begins[p] for p in wanted})
        while wanted:
            for records in (await reader.fetch()).values():
                found += records
            wanted = {p for p in wanted if await reader.position(p) < ends[p]}
    finally:
        await reader.close()
    return found


def lines(documents: Iterable[object]) -> bytes:
    return b"".join(orjson.dumps(document) + b"\n" for document in documents)


def made(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return list(synthetic.documents(count, seed))


def write(path: Path, documents: Iterable[object]) -> Path:
    path.write_bytes(lines(documents))
    return path
