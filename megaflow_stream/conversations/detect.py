"""Which dialect a document is written in, by its content and never by the name of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaflow_stream.conversations.canonical import Conversation
from megaflow_stream.conversations.parsers import PARSERS, parser
from megaflow_stream.errors import BadRecord

AUTO = "auto"
_MATCHES = [(name, candidate.matches) for name, candidate in PARSERS.items()]


def detect(document: Mapping[str, Any]) -> str:
    """The name of the one dialect that matches. Raises `BadRecord` where none does, or several."""
    names = [name for name, matches in _MATCHES if matches(document)]
    if len(names) == 1:
        return names[0]
    if names:
        raise BadRecord(f"the format is ambiguous, it could be {' or '.join(names)}: name one with --format")
    keys = ", ".join(list(document)[:8]) or "none"
    raise BadRecord(f"no known format (its keys are: {keys}); known are {', '.join(PARSERS)}")


def parse(document: Mapping[str, Any], dataset: str, format: str = AUTO) -> Conversation:
    """The canonical conversation of a document of a named dialect, or of the one that its content shows."""
    return parser(detect(document) if format == AUTO else format).parse(document, dataset)
