"""The embedded services of a project: an Apache Kafka and an S3 server, found again by every command."""

from megaflow_stream.runtime.services.embedded import (
    ServiceStatus,
    dead,
    down,
    release,
    restart_dead,
    status,
    up,
)
from megaflow_stream.runtime.services.endpoints import Endpoints
from megaflow_stream.runtime.services.state import User

__all__ = ["Endpoints", "ServiceStatus", "User", "dead", "down", "release", "restart_dead", "status", "up"]
