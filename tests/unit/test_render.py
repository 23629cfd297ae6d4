"""The rendering: each text once, and loss on exactly the assistant's own tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.conversations.canonical import Conversation, Message, ToolCall
from megaflow_stream.features.render import Rendered, render, texts
from tests.unit.features_samples import CONVERSATION, conversations, tokenizer


def spelled(rendered: Rendered) -> list[tuple[bool, str]]:
    """The rendering as runs of trained and untrained text."""
    mask, runs = rendered.loss_mask, []
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    for first, last in pairwise(edges):
        runs.append((bool(mask[first]), tokenizer().decode(rendered.tokens[first:last])))
    return runs


def test_the_rendering_and_its_mask_in_full() -> None:
    (rendered,) = render([CONVERSATION], tokenizer())
    assert spelled(rendered) == [
        (
            False,
            '<|begin|><|system|><|tool|>[{"name": "get_order"}]<|end|><|system|>You help customers.<|end|>'
            "<|developer|>Be short.<|end|><|user|>mia\nWhere is my order?<|end|><|assistant|>",
        ),
        (
            True,
            '<|think|>Look it up.<|think|>One moment.<|call|>get_order\n{"id": "W1"}<|call|>get_user\n{}<|end|>',
        ),
        (False, '<|tool|>get_order\n{"status": "sent"}<|end|><|tool|>\n[]<|end|><|assistant|>'),
        (True, "It was sent.<|end|>"),
    ]
    assert rendered.turns[0] == 1
    assert len(rendered.turns) == 1 + len(CONVERSATION.messages)


@given(st.lists(conversations(), max_size=5))
def test_masks_come_from_construction(many: list[Conversation]) -> None:
    """Against an independent count, whatever the texts spell."""
    control = tokenizer().control
    for conversation, rendered in zip(many, render(many, tokenizer()), strict=True):
        expected_tokens, expected_mask = [control["<|begin|>"]], [False]

        def put(piece: str | int, own: bool, tokens=expected_tokens, mask=expected_mask) -> None:  # type: ignore[no-untyped-def]
            ids = [piece] if isinstance(piece, int) else tokenizer().encode([piece])[0].tolist()
            tokens += ids
            mask += [own] * len(ids)

        if conversation.tools:
            for piece in (control["<|system|>"], control["<|tool|>"], conversation.tools, control["<|end|>"]):
                put(piece, False)
        for message in conversation.messages:
            own = message.role == "assistant"
            put(control[f"<|{message.role}|>"], False)
            if message.name or message.role == "tool":
                put(message.name + "\n", False)
            if message.reasoning:
                for piece in (control["<|think|>"], message.reasoning, control["<|think|>"]):
                    put(piece, own)
            put(message.content, own)
            for call in message.tool_calls:
                put(control["<|call|>"], own)
                put(call.name + "\n" + call.arguments, own)
            put(control["<|end|>"], own)
        assert rendered.tokens.tolist() == expected_tokens
        assert rendered.loss_mask.tolist() == expected_mask
        assert rendered.conversation == conversation.id
        assert np.count_nonzero(rendered.tokens == control["<|begin|>"]) == 1


@given(conversations())
def test_every_text_stands_there_once_as_it_came(conversation: Conversation) -> None:
    (rendered,) = render([conversation], tokenizer())
    joined = "".join(texts(conversation))
    controls = set(tokenizer().control.values())
    assert tokenizer().decode([t for t in rendered.tokens if t not in controls]) == joined
    for message in conversation.messages:
        assert message.content in joined
        assert message.reasoning in joined


def test_arguments_are_not_encoded_twice() -> None:
    arguments = '{"text": "a \\"quoted\\" word\\n", "n": 1.50}'
    message = Message(role="assistant", tool_calls=[ToolCall(name="f", arguments=arguments)])
    (rendered,) = render([replace(CONVERSATION, tools="", messages=[message])], tokenizer())
    assert tokenizer().decode(rendered.tokens) == f"<|begin|><|assistant|><|call|>f\n{arguments}<|end|>"


def test_a_user_who_calls_tools_is_not_trained() -> None:
    messages = [Message(role="user", tool_calls=[ToolCall(name="toggle", arguments="{}")]), Message(role="tool")]
    (rendered,) = render([replace(CONVERSATION, tools="", messages=messages)], tokenizer())
    assert not rendered.loss_mask.any()


def test_no_conversation_is_no_rendering() -> None:
    assert render([], tokenizer()) == []
