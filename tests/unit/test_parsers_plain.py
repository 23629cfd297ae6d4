"""A parser's quick look says yes only where the parser reads the document, and to nearly every good one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaflow_stream.conversations import synthetic
from megaflow_stream.conversations.detect import detect
from megaflow_stream.conversations.files import Document, read, sources
from megaflow_stream.conversations.identity import own_id
from megaflow_stream.conversations.parsers import PARSERS, PLAIN
from megaflow_stream.errors import BadRecord
from megaflow_stream.publishing.record import Recorder

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
WRONG: list[Any] = [None, "", "x", 0, 1.5, True, [], ["x"], [{}], {}, {"type": "text"}, DEEP]
ADDED = ("audio", "custom", "function_call", "functions", "images", "refusal", "tools")
MESSAGES = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"},
    {"role": "assistant", "content": "One."},
]
GOOD: dict[str, dict[str, Any]] = {
    "openai_chat": {"id": "a", "messages": MESSAGES, "tools": [{"name": "f"}]},
    "tau_bench": {"id": "a", "traj": MESSAGES, "reward": 1.0, "info": {}},
}


def spoilt(value: Any) -> Iterator[Any]:
    """The value with one thing in it changed, left out or added, in every place and way."""
    yield from WRONG
    if isinstance(value, list):
        for at, item in enumerate(value):
            yield [*value[:at], *value[at + 1 :]]
            for other in spoilt(item):
                yield [*value[:at], other, *value[at + 1 :]]
    if isinstance(value, dict):
        for key, item in value.items():
            yield {name: kept for name, kept in value.items() if name != key}
            for other in spoilt(item):
                yield {**value, key: other}
        for key in ADDED:
            for other in WRONG:
                yield {**value, key: other}
                for left_out in value:
                    yield {**{name: kept for name, kept in value.items() if name != left_out}, key: other}


@pytest.mark.parametrize("name", PLAIN)
def test_what_a_quick_look_takes_is_read(name: str) -> None:
    taken = 0
    for document in [GOOD[name], *spoilt(GOOD[name])]:
        if isinstance(document, dict) and PLAIN[name](document):
            PARSERS[name].parse(document, "d")
            taken += 1
    assert taken > 50


def every(folder: Path) -> Iterator[dict[str, Any]]:
    for source in sources([folder]):
        for item in read(source):
            if isinstance(item, Document):
                yield item.document


def test_a_quick_look_takes_what_the_project_makes_itself() -> None:
    found = [(detect(made), made) for made in synthetic.documents(500)]
    looked = [PLAIN[name](made) for name, made in found if name in PLAIN]
    assert len(looked) > 300
    assert all(looked)


def test_a_record_is_the_same_with_and_without_a_quick_look(
    samples: Path, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(dataset="d", producer="p", format="auto", max_message_bytes=1 << 30)

    def records() -> list[object]:
        made: list[object] = []
        for document in [*every(samples), *every(real_data / "tau-bench"), {"messages": [7], "id": "x"}]:
            try:
                key, _, headers, name = recorder.prepare(b"", document)
                made.append((key, dict(headers)["format"], name, own_id(document)))
            except BadRecord as error:
                made.append(str(error))
        return made

    looked = records()
    for name in list(PLAIN):
        monkeypatch.delitem(PLAIN, name)
    assert records() == looked
