"""One worker of the engine's benchmark: `python benchmarks/engine_worker.py BROKER CASE plain|transactions`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiokafka import TopicPartition as KafkaPartition

from megaflow_stream import logs
from megaflow_stream.allocator import keep_freed_memory
from megaflow_stream.bus import TopicPartition
from megaflow_stream.bus.kafka import KafkaBus
from megaflow_stream.bus.kafka_producer import KafkaProducer
from megaflow_stream.bus.security import Security
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.processing.engine import Engine

WORK = Path(__file__).parent / "engine_work.py"


class Untransacted(KafkaProducer):
    """The engine's producer without transactions: sends, then commits offsets by the group's own request."""

    reader: Any = None

    async def begin(self) -> None:
        return

    async def send_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        self.offsets = offsets

    async def commit(self, sent: Iterable[asyncio.Future[object]]) -> None:
        await asyncio.gather(*sent)
        await self.reader._consumer.commit({KafkaPartition(*tp): offset for tp, offset in self.offsets.items()})


class PlainBus(KafkaBus):
    """The same bus, at least once."""

    reader: Any = None

    async def producer(self, transactional_id: str | None = None, **options: Any) -> KafkaProducer:
        options.pop("transaction_timeout_seconds", None)
        made = Untransacted(self._options, None, 0, options.get("batch_bytes", 1 << 17), 0)
        await made.start()
        made.reader = self.reader
        return made

    async def group_reader(self, *args: Any, **options: Any) -> Any:
        self.reader = await super().group_reader(*args, **options)
        return self.reader


async def main(broker: str, case: str, mode: str) -> None:
    logs.setup("bench")
    keep_freed_memory()  # as `megaflow process` does
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    (found,) = [p for p in definitions(WORK, Processor) if p.name.endswith(f"-{case}")]
    bus = (KafkaBus if mode == "transactions" else PlainBus)(broker, Security(), "bench")
    works: Sequence[tuple[Path, Processor]] = [(WORK, found)]
    await Engine(bus, works).run(stop)
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
