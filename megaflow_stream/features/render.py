"""Canonical conversation -> token ids and loss mask.

    <|begin|>
    <|system|><|tool|>TOOLS<|end|>                                     only where tools are offered
    <|system|>TEXT<|end|>        <|developer|>TEXT<|end|>        <|user|>TEXT<|end|>
    <|assistant|><|think|>REASONING<|think|>TEXT<|call|>NAME\\nARGUMENTS<|end|>       each part only where it is there
    <|tool|>NAME\\nRESULT<|end|>

A participant's name stands before its text, with a newline. Call ids are left out: calls and results pair by their
order, and a model should not learn to invent ids. Every other text stands there once, as it came.

Loss is on exactly what the assistant produces: everything after `<|assistant|>` (and the participant's name) up to
and with its `<|end|>`. The mask comes from construction: each segment is encoded on its own and carries its flag;
nothing is searched for in text or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_stream.conversations.canonical import Conversation, Message
from megaflow_stream.features.tokenizer import (
    ASSISTANT,
    BEGIN,
    CALL,
    DEVELOPER,
    END,
    SYSTEM,
    THINK,
    TOOL,
    USER,
    Tokenizer,
)

_ROLES = {"system": SYSTEM, "developer": DEVELOPER, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendered:
    """One conversation in tokens.

    conversation: its id.
    tokens: uint16 or uint32 [n], the first is `<|begin|>`.
    loss_mask: bool [n], true for the assistant's own tokens.
    turns: int64 [turns], where each turn begins in `tokens`; the first is 1.
    """

    conversation: str
    tokens: NDArray[Any]
    loss_mask: NDArray[np.bool_]
    turns: NDArray[np.int64]


class _Segments:
    """Control tokens and texts in order; a text is the index of a slot that is filled by one batch encoding."""

    def __init__(self, control: dict[str, int]) -> None:
        self.control = control
        self.texts: list[str] = []
        self.items: list[int] = []  # a control token's id, or ~place of a text in `texts`
        self.trained: list[bool] = []
        self.turns: list[int] = []  # places in `items` where a turn begins

    def token(self, spelling: str, trained: bool = False) -> None:
        self.items.append(self.control[spelling])
        self.trained.append(trained)

    def text(self, text: str, trained: bool = False) -> None:
        if text:
            self.items.append(~len(self.texts))
            self.trained.append(trained)
            self.texts.append(text)

    def conversation(self, conversation: Conversation) -> None:
        self.token(BEGIN)
        if conversation.tools:
            self.turns.append(len(self.items))
            self.token(SYSTEM)
            self.token(TOOL)
            self.text(conversation.tools)
            self.token(END)
        for message in conversation.messages:
            self.message(message)

    def message(self, message: Message) -> None:
        own = message.role == "assistant"
        self.turns.append(len(self.items))
        self.token(_ROLES[message.role])
        if message.name or message.role == "tool":
            self.text(message.name + "\n")
        if message.reasoning:
            self.token(THINK, own)
            self.text(message.reasoning, own)
            self.token(THINK, own)
        self.text(message.content, own)
        for call in message.tool_calls:
            self.token(CALL, own)
            self.text(f"{call.name}\n{call.arguments}", own)
        self.token(END, own)


def texts(conversation: Conversation) -> list[str]:
    """The texts of a conversation as they are encoded, one by one: what a tokenizer is trained on."""
    segments = _Segments(dict.fromkeys((BEGIN, SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL, CALL, THINK, END), 0))
    segments.conversation(conversation)
    return segments.texts


def render(conversations: Sequence[Conversation], tokenizer: Tokenizer) -> list[Rendered]:
    """Renders conversations, in one batch encoding of all their texts."""
    segments = _Segments(tokenizer.control)
    bounds = [0]
    turn_bounds = [0]
    for conversation in conversations:
        segments.conversation(conversation)
        bounds.append(len(segments.items))
        turn_bounds.append(len(segments.turns))

    encoded = tokenizer.encode(segments.texts)
    controls = [np.array([token], tokenizer.dtype) for token in range(len(tokenizer.control))]
    pieces = [controls[item] if item >= 0 else encoded[~item] for item in segments.items]
    if not pieces:
        return []
    sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
    tokens = np.concatenate(pieces)
    trained = np.repeat(np.array(segments.trained, np.bool_), sizes)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    turns = starts[np.array(segments.turns, np.int64)]
    out = []
    for place, conversation in enumerate(conversations):
        first, last = starts[bounds[place]], starts[bounds[place + 1]]
        out.append(
            Rendered(
                conversation=conversation.id,
                tokens=tokens[first:last],
                loss_mask=trained[first:last],
                turns=turns[turn_bounds[place] : turn_bounds[place + 1]] - first,
            )
        )
    return out
