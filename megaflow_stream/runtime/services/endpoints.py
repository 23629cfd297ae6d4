"""Where Kafka and S3 are, and how to log in: the same for embedded and for existing services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megaflow_stream.bus.security import Security


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoints:
    """Addresses and credentials. An address is "" for a service that was not asked for.

    pids, stops: of embedded ones only: their processes, and how often they had been stopped on purpose before.
    """

    bootstrap_servers: str = ""
    security: Security = field(default_factory=Security)
    endpoint_url: str = ""
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    region: str = "us-east-1"
    stops: int = 0
    pids: Mapping[str, int] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """The settings' variables that make a child process use these services and start none."""
        found: dict[str, str] = {}
        if self.bootstrap_servers:
            found |= {
                "MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap_servers,
                "MEGAFLOW_KAFKA__SECURITY_PROTOCOL": self.security.protocol,
                "MEGAFLOW_KAFKA__SASL_MECHANISM": self.security.mechanism,
                "MEGAFLOW_KAFKA__USERNAME": self.security.username,
                "MEGAFLOW_KAFKA__PASSWORD": self.security.password,
                "MEGAFLOW_KAFKA__CA_FILE": self.security.ca_file,
            }
        if self.endpoint_url:
            found |= {
                "MEGAFLOW_S3__ENDPOINT_URL": self.endpoint_url,
                "MEGAFLOW_S3__ACCESS_KEY": self.access_key,
                "MEGAFLOW_S3__SECRET_KEY": self.secret_key,
                "MEGAFLOW_S3__REGION": self.region,
            }
        return found
