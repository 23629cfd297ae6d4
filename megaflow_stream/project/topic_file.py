"""A file of `topics/`, read into the topics that it declares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaflow_stream.config.units import parse_bytes, parse_duration
from megaflow_stream.config.yaml import read_yaml
from megaflow_stream.definitions.topic import Topic
from megaflow_stream.project.table import Table

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")  # Kafka's own rule
_DEFAULTS = Topic(name="-")
# To the broker a message is a batch, and producers send batches of 128 KiB: a lower limit would refuse them for ever.
LEAST_MESSAGE_BYTES = 256 << 10


def read_topic(path: Path) -> Topic:
    """The topic of a file, its name still with `{dataset}` where it is a family. Raises `SettingError`."""
    located = read_yaml(path)
    table = Table(located, f"topic {path.stem}")
    topic = Topic(
        name=table.parsed("name", _name, ""),
        partitions=table.take("partitions", "integer", _DEFAULTS.partitions, least=1),
        key=table.take("key", "text", ""),
        value=table.choice("value", ("json", "arrow", "bytes"), _DEFAULTS.value),
        cleanup=table.choice("cleanup", ("delete", "compact", "compact,delete"), _DEFAULTS.cleanup),
        retention_seconds=table.parsed("retention", _retention, _DEFAULTS.retention_seconds),
        retention_bytes=table.parsed("retention_size", _retention_size, _DEFAULTS.retention_bytes),
        segment_bytes=table.take("segment", "bytes", _DEFAULTS.segment_bytes, least=1 << 20),  # KIP-1030
        max_message_bytes=table.take("max_message", "bytes", _DEFAULTS.max_message_bytes, least=LEAST_MESSAGE_BYTES),
        purpose=table.take("purpose", "text", ""),
    )
    table.end()
    if not topic.name:
        raise located.error("the topic has no name", "give it `name:`, as Kafka shall know it")
    return topic


def expand(topic: Topic, datasets: Sequence[str]) -> list[Topic]:
    """A family becomes one topic for each dataset; any other topic is itself."""
    if "{dataset}" not in topic.name:
        return [topic]
    return [replace(topic, name=topic.name.replace("{dataset}", dataset)) for dataset in datasets]


def _name(raw: Any) -> str:
    if not isinstance(raw, str) or not _NAME.fullmatch(raw.replace("{dataset}", "x")) or raw in (".", ".."):
        raise ValueError(f"{raw!r} cannot be a topic: letters, digits, '.', '_', '-', and {{dataset}} for a family")
    return raw


def _retention(raw: Any) -> float:
    if raw == "forever":
        return -1.0
    try:
        seconds = parse_duration(raw)
    except ValueError as error:
        raise ValueError(f"{error}, or `forever`") from None
    if seconds <= 0:
        raise ValueError("must be above 0, or `forever`")
    return seconds


def _retention_size(raw: Any) -> int:
    if raw == "unbounded":
        return -1
    try:
        return parse_bytes(raw)
    except ValueError as error:
        raise ValueError(f"{error}, or `unbounded`") from None
