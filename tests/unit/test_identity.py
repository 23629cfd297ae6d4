"""Ids: the document's own, else of dataset and content; never of where it was read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.bus.partitioner import partition_of
from megaflow_stream.conversations import detect
from megaflow_stream.conversations.identity import own_id
from megaflow_stream.publishing.spread import partitions_of

SAID = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    ("document", "own"),
    [
        ({"id": "a"}, "a"),
        ({"id": 17}, "17"),
        ({"id": 0}, "0"),
        ({"conversation_id": "c", "uuid": "u"}, "c"),
        ({"id": None, "uuid": "u"}, "u"),
        ({"id": "", "conversation_id": "c"}, "c"),
        ({"id": True}, None),
        ({"id": 1.5}, None),
        ({"id": ["a"]}, None),
        ({"task_id": 3}, None),
        ({}, None),
    ],
)
def test_the_documents_own(document: dict[str, Any], own: str | None) -> None:
    assert own_id(document) == own


def test_without_one_the_content_names_it() -> None:
    first = detect.parse({"messages": SAID}, "agent")
    assert first.id == detect.parse({"messages": SAID, "source": "elsewhere"}, "agent").id
    assert first.id != detect.parse({"messages": SAID}, "other").id
    assert first.id != detect.parse({"messages": SAID[:1]}, "agent").id
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
    assert first.id == detect.parse({"conversations": turns}, "agent").id, "in whatever dialect"


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 50))
def test_many_keys_go_where_one_goes(keys: list[bytes], partitions: int) -> None:
    assert partitions_of(keys, partitions) == [partition_of(key, partitions) for key in keys]
