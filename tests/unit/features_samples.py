"""Conversations and a small tokenizer for the tests of features and steps."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import strategies as st

from megaflow_stream.conversations.canonical import Conversation, Message, ToolCall
from megaflow_stream.features.tokenizer import CONTROLS, Tokenizer, train

TEXTS = [
    "I would like to change my reservation, please.",
    'get_order\n{"order_id": "W123", "items": [1, 2, 3]}',
    "Your order was delivered on Monday. Is there anything else that I can help you with?",
    "def main():\n    return 0\n",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Ich möchte meine Bestellung ändern. 私の注文",
] * 3

CONVERSATION = Conversation(
    id="c-1",
    dataset="agent",
    tools='[{"name": "get_order"}]',
    messages=[
        Message(role="system", content="You help customers."),
        Message(role="developer", content="Be short."),
        Message(role="user", content="Where is my order?", name="mia"),
        Message(
            role="assistant",
            reasoning="Look it up.",
            content="One moment.",
            tool_calls=[
                ToolCall(name="get_order", arguments='{"id": "W1"}', id="call_1"),
                ToolCall(name="get_user", arguments="{}", id="call_2"),
            ],
        ),
        Message(role="tool", content='{"status": "sent"}', name="get_order", call_id="call_1"),
        Message(role="tool", content="[]", call_id="call_2"),
        Message(role="assistant", content="It was sent."),
    ],
)


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer(train(TEXTS, 400))


def conversations() -> st.SearchStrategy[Conversation]:
    """Any conversation, with texts that try to be control tokens."""
    texts = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(CONTROLS), max_size=3).map("".join))
    calls = st.lists(st.builds(ToolCall, name=st.text(min_size=1, max_size=8), arguments=texts), max_size=2)
    message = st.builds(
        Message,
        role=st.sampled_from(("system", "developer", "user", "assistant", "tool")),
        content=texts,
        tool_calls=calls,
        reasoning=texts,
        name=st.text(max_size=5),
    )
    return st.builds(
        Conversation,
        id=st.text(min_size=1, max_size=8),
        dataset=st.just("agent"),
        messages=st.lists(message, min_size=1, max_size=8),
        tools=texts,
    )
