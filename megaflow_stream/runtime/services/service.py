"""What starting, watching and stopping a service needs to know of it. Kafka and S3 each implement it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from megaflow_stream.runtime.services.credentials import Credentials
from megaflow_stream.runtime.services.process import Launch

Say = Callable[[str], None]


class NotReady(Exception):
    """The service does not answer as it should yet; the text says what it did."""


class Service(Protocol):
    """One embedded service of a project.

    port_names: the ports that it listens on; the first is the one that clients call.
    stop_seconds: how long its own way of stopping may take before it is killed.
    """

    name: str
    title: str
    port_names: tuple[str, ...]
    stop_seconds: float

    def marker(self, state_dir: Path) -> str:
        """The argument by which a process of this project's service is known."""
        ...

    def prepare(
        self, state_dir: Path, ports: Mapping[str, int], credentials: Credentials, memory_bytes: int, say: Say
    ) -> Launch:
        """Writes its configuration and says how to start it. May block for downloads."""
        ...

    def check(self, ports: Mapping[str, int], credentials: Credentials, timeout_seconds: float) -> None:
        """One real exchange over its protocol, as a client would. Blocks; raises `NotReady`."""
        ...

    def sweep(self, ports: Mapping[str, int]) -> None:
        """Removes what a stopped process leaves outside the project's folder."""
        ...
