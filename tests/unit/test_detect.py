"""Dialects are told by content."""

from __future__ import annotations

from typing import Any

import pytest

from megaflow_stream.conversations.detect import detect, parse
from megaflow_stream.conversations.parsers import PARSERS
from megaflow_stream.errors import BadRecord, SettingError

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
SHARED = {"conversations": [{"from": "human", "value": "Hi"}]}
RUN = {"task_id": 1, "traj": [{"role": "user", "content": "Hi"}], "reward": 1.0, "info": {}, "trial": 0}
SHOWN = {"messages_display": "user: Hi\nassistant: Hello"}


@pytest.mark.parametrize(
    ("document", "name"),
    [
        (CHAT, "openai_chat"),
        (SHARED, "sharegpt"),
        (RUN, "tau_bench"),
        (SHOWN, "tau_bench"),
        ({"messages": []}, "openai_chat"),
    ],
)
def test_each_dialect(document: dict[str, Any], name: str) -> None:
    assert detect(document) == name
    assert parse(document, "agent").format == name


def test_unknown_names_the_known_ones() -> None:
    with pytest.raises(BadRecord) as caught:
        detect({"question": "?", "answer": "!"})
    assert all(name in str(caught.value) for name in (*PARSERS, "question", "answer"))


@pytest.mark.parametrize("document", [{"messages": "Hi"}, {"messages": ["Hi"]}, {"conversations": [{"role": "user"}]}])
def test_the_key_alone_does_not_make_a_dialect(document: dict[str, Any]) -> None:
    with pytest.raises(BadRecord, match="no known format"):
        detect(document)


def test_ambiguous_lists_the_candidates_and_a_name_settles_it() -> None:
    both = {**CHAT, **SHARED}
    with pytest.raises(BadRecord, match=r"openai_chat or sharegpt.*--format"):
        detect(both)
    assert parse(both, "agent", "sharegpt").format == "sharegpt"
    assert parse(both, "agent", "openai-chat").format == "openai_chat"


def test_an_unknown_name_is_a_wrong_setting() -> None:
    with pytest.raises(SettingError, match="alpaca"):
        parse(CHAT, "agent", "alpaca")
