"""How to talk to a cluster that asks for credentials."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Security:
    """Kafka's own names: protocol PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL; mechanism PLAIN or SCRAM-SHA-*."""

    protocol: str = "PLAINTEXT"
    mechanism: str = "PLAIN"
    username: str = ""
    password: str = ""
    ca_file: str = ""

    def client_options(self) -> dict[str, Any]:
        """The keyword arguments of an aiokafka client."""
        options: dict[str, Any] = {"security_protocol": self.protocol}
        if self.protocol.startswith("SASL"):
            options |= {
                "sasl_mechanism": self.mechanism,
                "sasl_plain_username": self.username,
                "sasl_plain_password": self.password,
            }
        if self.protocol.endswith("SSL"):
            options["ssl_context"] = ssl.create_default_context(cafile=self.ca_file or None)
        return options
