"""Ports of 127.0.0.1 that are free now and stay free while a service is down for a moment.

They are taken from below the kernel's range for outgoing connections. A port inside that range is lost in the seconds
in which a killed broker is away: any client may be given it as its own end, and a client that keeps calling a dead
port of its own machine can even be connected to itself (TCP simultaneous open, RFC 9293, 3.5).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from megaflow_stream.errors import MegaflowError

LOWEST = 20_000
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_FIRST_OUTGOING = 32_768  # Linux; others start at 49152 (RFC 6335)


def choose(names: Iterable[str], kept: Mapping[str, int]) -> dict[str, int]:
    """A free port for every name, its kept one where that is still free. All of them differ."""
    with ExitStack() as held:  # each found port stays bound until all are found
        chosen: dict[str, int] = {}
        for name in names:
            wanted = kept.get(name)
            if wanted is not None and (found := _bind(wanted)) is not None:
                chosen[name] = wanted
                held.enter_context(found)
                continue
            chosen[name], found = _any()
            held.enter_context(found)
        return chosen


def _any() -> tuple[int, socket.socket]:
    top = _first_outgoing()
    for _ in range(500):
        port = random.SystemRandom().randrange(LOWEST, top)
        if (found := _bind(port)) is not None:
            return port, found
    raise MegaflowError(f"no free port of 127.0.0.1 found between {LOWEST} and {top}")


def _bind(port: int) -> socket.socket | None:
    """A socket on the port, as the services bind theirs (SO_REUSEADDR: ends in TIME_WAIT are no hindrance)."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen(1)
    except OSError:
        found.close()
        return None
    return found


def _first_outgoing() -> int:
    try:
        first = int(RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = DEFAULT_FIRST_OUTGOING
    # A machine may be set to use nearly all ports for outgoing connections: then there is no safe place below.
    return first if first >= LOWEST + 2_000 else 65_536
