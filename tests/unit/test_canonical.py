"""The canonical form: JSON and back, content hashes, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.conversations.canonical import (
    Conversation,
    Message,
    ToolCall,
    content_hash,
    content_id,
    from_json,
    to_json,
)
from megaflow_stream.errors import BadRecord

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
calls = st.builds(ToolCall, name=texts, arguments=texts, id=texts)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    content=texts,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    reasoning=texts,
    name=texts,
    call_id=texts,
)
conversations = st.builds(
    Conversation,
    id=texts,
    dataset=texts,
    messages=st.lists(messages, max_size=4),
    tools=texts,
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    metadata=st.dictionaries(texts, st.integers(-5, 5), max_size=2),
    format=texts,
)


@given(conversations)
def test_json_and_back(conversation: Conversation) -> None:
    assert from_json(to_json(conversation)) == conversation


def test_the_hash_is_of_the_content_alone() -> None:
    said = [Message(role="user", content="Hello"), Message(role="assistant", content="Hi")]
    assert len(content_hash(said)) == 16
    assert content_hash(said) == content_hash(list(said))
    assert content_hash(said) != content_hash(said, tools="[]")
    assert content_hash(said) != content_hash(said[::-1])
    assert content_id("a", said) != content_id("b", said)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"id":"1","dataset":"d","messages":[1]}', b'{"id":"1"}'])
def test_other_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadRecord, match="not a canonical conversation"):
        from_json(data)
