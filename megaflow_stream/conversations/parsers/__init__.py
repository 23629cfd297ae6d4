"""The dialects that conversations come in: one small module each, found by name here.

A parser has `matches(document)`, which looks at the content and nothing else, and `parse(document, dataset)`, which
gives the canonical conversation or raises `BadRecord` with the index of the message. Another dialect is another
module and another line below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from megaflow_stream.conversations.canonical import Conversation
from megaflow_stream.conversations.parsers import openai_chat, sharegpt, tau_bench
from megaflow_stream.errors import SettingError


class Parser(Protocol):
    """What each module here is."""

    def matches(self, document: Mapping[str, Any]) -> bool: ...

    def parse(self, document: Mapping[str, Any], dataset: str) -> Conversation: ...


PARSERS: dict[str, Parser] = {
    openai_chat.NAME: openai_chat,
    sharegpt.NAME: sharegpt,
    tau_bench.NAME: tau_bench,
}

# Of the dialects that have one: a quick look that says yes only where `parse` is sure to succeed. Who needs no more
# than a document's own id is spared the canonical form.
PLAIN: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    openai_chat.NAME: openai_chat.plain,
    tau_bench.NAME: tau_bench.plain,
}


def parser(name: str) -> Parser:
    """The parser of a dialect, `-` and `_` alike. Raises `SettingError` that names the known ones."""
    found = PARSERS.get(name.replace("-", "_").lower())
    if found is None:
        raise SettingError(f"there is no format {name!r}", hint=f"known are auto, {', '.join(PARSERS)}")
    return found
