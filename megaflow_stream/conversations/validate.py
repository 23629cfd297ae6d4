"""What a parsed conversation must be to be trained on: pure checks, used by the processor `normalise`.

Two outcomes beside "good": `check` raises for a conversation that contradicts itself (it goes to the dead-letter
topic, somebody should look at it); `drop_reason` names why a sound conversation cannot be trained on.
"""

from __future__ import annotations

from megaflow_stream.conversations.canonical import ROLES, Conversation
from megaflow_stream.conversations.pairing import pair
from megaflow_stream.errors import BadRecord

CALLS_NOT_RECORDED = "calls_not_recorded"


def check(conversation: Conversation) -> None:
    """Raises `BadRecord` naming the message: no messages, no text at all, an unknown role, a tool call by another
    than the assistant or the user, a tool result without a call."""
    messages = conversation.messages
    if not messages:
        raise BadRecord("an empty conversation: there are no messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise BadRecord(f"message {index}: unknown role {message.role!r}; known are {', '.join(ROLES)}")
        if message.tool_calls and message.role not in ("assistant", "user"):
            raise BadRecord(f"message {index}: a {message.role} cannot call tools")
    if not any(m.content or m.reasoning or m.tool_calls for m in messages):
        raise BadRecord("an empty conversation: no message has any text")
    if CALLS_NOT_RECORDED not in conversation.metadata:
        pair(messages)


def drop_reason(conversation: Conversation) -> str | None:
    """Why a conversation that passed `check` is not trained on, as a name for counting; None where it is."""
    turns = [m for m in conversation.messages if m.role == "assistant"]
    if not turns:
        return "no_assistant_turn"
    if conversation.metadata.get(CALLS_NOT_RECORDED):
        return CALLS_NOT_RECORDED
    if not any(m.content.strip() or m.reasoning.strip() or m.tool_calls for m in turns):
        return "empty_assistant"
    return None
