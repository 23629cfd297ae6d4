"""A producer's document to a canonical conversation, or the reason why not."""

from __future__ import annotations

import orjson
import pytest

from megaflow_stream.errors import BadRecord
from megaflow_stream.processing.steps.normalise import Unwanted, normalise

CHAT = {
    "id": "own",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you."}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\"b\\""}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
        {"role": "assistant", "content": "Done."},
    ],
}


def test_a_document_becomes_a_conversation() -> None:
    found = normalise(orjson.dumps(CHAT), key=None)
    assert (found.id, found.dataset, found.format) == ("own", "agent", "openai_chat")
    assert "Hello, " in found.messages[0].content
    assert "you." in found.messages[0].content
    assert found.messages[1].tool_calls[0].arguments == '{"a": "\\"b\\""}'


def test_the_records_key_is_the_id_and_its_header_the_dataset() -> None:
    found = normalise(orjson.dumps(CHAT), key=b"key", dataset="support", format="openai_chat")
    assert (found.id, found.dataset) == ("key", "support")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "no value"),
        (b"", "no value"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "a JSON object, this is a list"),
        (b'{"x": 1}', "no known format"),
        (b'{"messages": []}', "messages"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_what_cannot_be_understood_is_a_bad_record(value: bytes | None, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        normalise(value, key=b"k")


def test_an_unknown_format_is_a_bad_record_not_a_crash() -> None:
    with pytest.raises(BadRecord, match="morse"):
        normalise(orjson.dumps(CHAT), key=b"k", format="morse")


def test_a_sound_conversation_that_is_not_trained_on_is_unwanted() -> None:
    with pytest.raises(Unwanted) as caught:
        normalise(b'{"messages": [{"role": "user", "content": "Hello?"}]}', key=b"k")
    assert (caught.value.reason, caught.value.conversation) == ("no_assistant_turn", "k")
