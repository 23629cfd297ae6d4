"""A topic as a project declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One topic, or with `{dataset}` in its name one for each dataset of the project.

    retention_seconds, retention_bytes: -1 keeps everything.
    segment_bytes: size of a file of the log; None is the broker's. Only closed files are compacted or expire, so it
        bounds what a compacted topic keeps.
    purpose: what it is for, in a sentence; shown by `megaflow topics list`.
    """

    name: str
    partitions: int = 4
    key: str = ""
    value: Literal["json", "arrow", "bytes"] = "json"
    cleanup: Literal["delete", "compact", "compact,delete"] = "delete"
    retention_seconds: float = -1
    retention_bytes: int = -1
    segment_bytes: int | None = None
    max_message_bytes: int = 8 << 20
    purpose: str = ""

    def configs(self) -> dict[str, str]:
        """The topic's settings in Kafka's own names."""
        retention_ms = -1 if self.retention_seconds < 0 else int(self.retention_seconds * 1000)
        segment = {} if self.segment_bytes is None else {"segment.bytes": str(self.segment_bytes)}
        return segment | {
            "cleanup.policy": self.cleanup,
            "retention.ms": str(retention_ms),
            "retention.bytes": str(self.retention_bytes),
            "max.message.bytes": str(self.max_message_bytes),
        }
