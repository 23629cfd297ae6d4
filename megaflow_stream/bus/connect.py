"""From an address to a bus."""

from __future__ import annotations

from megaflow_stream.bus.api import Bus
from megaflow_stream.bus.security import Security


async def connect(bootstrap_servers: str, *, security: Security | None = None, client_id: str = "megaflow") -> Bus:
    """A bus on a real Kafka cluster. Raises `ServiceUnreachable` when no broker answers within 10 s."""
    from megaflow_stream.bus.kafka import KafkaBus

    bus = KafkaBus(bootstrap_servers, security or Security(), client_id)
    await bus.check()
    return bus
