"""Asks a broker for its metadata over a bare socket, with credentials where it wants them.

A client library would retry, log and keep threads; readiness needs one exchange and a plain answer. The messages are
the oldest versions that Kafka 4 still speaks (KIP-896): SaslHandshake 1, SaslAuthenticate 0, Metadata 0
(https://kafka.apache.org/protocol).
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from megaflow_stream.runtime.services.service import NotReady

METADATA, SASL_HANDSHAKE, SASL_AUTHENTICATE = 3, 17, 36
LARGEST_ANSWER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker as the cluster names it to its clients."""

    node_id: int
    host: str
    port: int


def brokers(
    host: str, port: int, *, username: str = "", password: str = "", timeout_seconds: float = 2.0
) -> list[Broker]:
    """The live brokers, as the one at host:port says. Raises `NotReady`."""
    try:
        with socket.create_connection((host, port), timeout_seconds) as connection:
            connection.settimeout(timeout_seconds)
            if connection.getsockname() == connection.getpeername():
                raise NotReady("nothing listens there: the connection came back to itself")
            if password:
                _authenticate(connection, username, password)
            # An empty list would mean every topic in version 0; a name that cannot be asks for brokers alone.
            answer = _ask(connection, METADATA, 0, struct.pack(">i", 1) + _string("."))
    except (OSError, struct.error, UnicodeDecodeError) as error:
        raise NotReady(str(error) or type(error).__name__) from error
    found, at = [], 4
    for _ in range(struct.unpack_from(">i", answer)[0]):
        node_id, length = struct.unpack_from(">ih", answer, at)
        name = answer[at + 6 : at + 6 + length].decode()
        (number,) = struct.unpack_from(">i", answer, at + 6 + length)
        found.append(Broker(node_id, name, number))
        at += 10 + length
    return found


def _authenticate(connection: socket.socket, username: str, password: str) -> None:
    answer = _ask(connection, SASL_HANDSHAKE, 1, _string("PLAIN"))
    if error := struct.unpack_from(">h", answer)[0]:
        raise NotReady(f"the broker does not speak SASL PLAIN there (error code {error})")
    token = f"\0{username}\0{password}".encode()
    answer = _ask(connection, SASL_AUTHENTICATE, 0, struct.pack(">i", len(token)) + token)
    if error := struct.unpack_from(">h", answer)[0]:
        raise NotReady(f"the broker refuses this project's credentials (error code {error})")


def _ask(connection: socket.socket, key: int, version: int, body: bytes) -> bytes:
    """Sends one request (header version 1) and returns the body of its answer."""
    message = struct.pack(">hhi", key, version, 1) + _string("megaflow-ready") + body
    connection.sendall(struct.pack(">i", len(message)) + message)
    (length,) = struct.unpack(">i", _read(connection, 4))
    if not 4 <= length <= LARGEST_ANSWER_BYTES:
        raise NotReady("something that is not Kafka answers there")
    return _read(connection, length)[4:]


def _read(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise NotReady("the broker closed the connection")
        parts += part
    return parts


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()
