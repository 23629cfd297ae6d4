"""What a conversation is called: by its own id where it has one, else by a hash of dataset and content.

Never by a file name, a line number or a random number: the same conversation has the same id wherever it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_stream.conversations.canonical import Message, content_id

ID_KEYS = ("id", "conversation_id", "uuid")


def own_id(document: Mapping[str, Any]) -> str | None:
    """The id that a document carries: the first of `id`, `conversation_id`, `uuid` that is a text or a whole number."""
    for key in ID_KEYS:
        value = document.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
    return None


def identify(document: Mapping[str, Any], dataset: str, messages: Sequence[Message], tools: str = "") -> str:
    """The id of a parsed document."""
    return own_id(document) or content_id(dataset, messages, tools)
