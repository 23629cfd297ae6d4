"""Masks personal data in a conversation: content, reasoning, tool-call arguments, names, and metadata.

The same value has the same placeholder throughout a conversation (`<email_1>`, `<phone_2>`, `<card_1>`), so that who
is meant stays clear; across conversations placeholders say nothing. Counts go out, values never. JSON stays JSON: a
bare number in it becomes a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaflow_stream.conversations.canonical import Conversation, Message
from megaflow_stream.errors import BadRecord
from megaflow_stream.processing.steps.personal import Found, find

_PLACEHOLDER = re.compile(r"<(email|phone|card)_([0-9]{1,6})>")
_DIGIT_OR_AT = re.compile(r"[0-9@]")


class Redactor:
    """The placeholders of one conversation.

    counts: how often each kind was masked.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._last: dict[str, int] = {}

    def reserve(self, text: str) -> None:
        """Placeholders that the text came with keep their meaning: new ones are numbered past them."""
        for match in _PLACEHOLDER.finditer(text):
            kind, number = match.group(1), int(match.group(2))
            self._last[kind] = max(self._last.get(kind, 0), number)

    def text(self, text: str) -> str:
        """`text` with its personal data masked."""
        if not _DIGIT_OR_AT.search(text):
            return text
        found = find(text)
        if not found:
            return text
        json = text.lstrip()[:1] in ("{", "[")
        out, at = [], 0
        for item in found:
            name = self._name(item)
            bare = json and _is_bare_value(text, item)
            out += [text[at : item.start], f'"{name}"' if bare else name]
            at = item.end
        return "".join([*out, text[at:]])

    def value(self, value: Any) -> Any:
        """A JSON value with its texts masked. Keys and numbers stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def _name(self, item: Found) -> str:
        self.counts[item.kind] = self.counts.get(item.kind, 0) + 1
        known = (item.kind, item.value)
        if known not in self._names:
            self._last[item.kind] = self._last.get(item.kind, 0) + 1
            self._names[known] = f"<{item.kind}_{self._last[item.kind]}>"
        return self._names[known]


def _is_bare_value(text: str, item: Found) -> bool:
    """Whether the number stands in JSON as a value without quotes."""
    before, after = item.start - 1, item.end
    while before >= 0 and text[before] in " \n\t\r" and item.start - before < 64:
        before -= 1
    while after < len(text) and text[after] in " \n\t\r" and after - item.end < 64:
        after += 1
    number = text[item.start].isdigit()
    return number and text[before : before + 1] in tuple(":[,") and text[after : after + 1] in tuple(",]}")


def redact(conversation: Conversation) -> tuple[Conversation, dict[str, int]]:
    """The conversation without personal data, and how often each kind was masked.

    Raises `BadRecord` for metadata nested too deep to be walked.
    """
    redactor = Redactor()
    for message in conversation.messages:
        for text in (message.content, message.reasoning, *(call.arguments for call in message.tool_calls)):
            if "_" in text:
                redactor.reserve(text)
    messages = [_message(message, redactor) for message in conversation.messages]
    try:
        metadata = redactor.value(conversation.metadata)
    except RecursionError as error:
        raise BadRecord("the metadata is nested too deep") from error
    return replace(conversation, messages=messages, metadata=metadata), redactor.counts


def _message(message: Message, redactor: Redactor) -> Message:
    return replace(
        message,
        content=redactor.text(message.content),
        reasoning=redactor.text(message.reasoning),
        name=redactor.text(message.name),
        tool_calls=[
            replace(call, arguments=redactor.text(call.arguments)) if call.arguments else call
            for call in message.tool_calls
        ],
    )
