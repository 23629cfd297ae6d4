"""Settings as they may be shown: units spelled out, secrets masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megaflow_stream.config.settings import Settings, settings
from megaflow_stream.config.units import show_bytes, show_duration

MASK = "***"


class Line(NamedTuple):
    """One setting. `value` is for programs (`null` is not set), `text` for people."""

    name: str
    value: Any
    text: str
    origin: str
    doc: str


def shown(found: Settings, origins: Mapping[str, str]) -> list[Line]:
    """Every setting, in its order. A secret that is set shows as `***`."""
    lines = []
    for setting in settings():
        value = found.value(setting)
        if setting.secret and value:
            value = MASK
        elif setting.kind == "bytes":
            value = show_bytes(value)
        elif setting.kind == "seconds":
            value = show_duration(value)
        lines.append(Line(setting.name, value, _text(value), origins[setting.name], setting.doc))
    return lines


def _text(value: Any) -> str:
    if value is None or value in ("", ()):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)
