"""One worker of an engine case, as a process: `python -m tests.engine_cases.worker BROKER FILE NAME`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from megaflow_stream import logs
from megaflow_stream.bus import connect
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.processing.engine import Engine
from megaflow_stream.processing.member import Options


async def main(broker: str, path: Path, name: str) -> None:
    logs.setup(f"worker {name}", logging.INFO)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    (found,) = [p for p in definitions(path, Processor) if p.name.endswith(name)]
    options = Options(session_seconds=3, heartbeat_seconds=0.5, transaction_timeout_seconds=10)
    bus = await connect(broker)
    await Engine(bus, [(path, found)], options=options).run(stop)
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
