"""Which tool result answers which tool call: by position, then by id.

Ids alone do not do: recorded agents reuse them inside a conversation (tau-bench has 49 such runs in 200), and older
dialects have none. A result answers a call of the nearest turn before it that still waits for one: there the call of
the same id, or, where either side has no id, the first that waits. A call is answered once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaflow_stream.conversations.canonical import Message, ToolCall
from megaflow_stream.errors import BadRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Message `result` is the answer to call number `call` of message `turn`; all are indexes."""

    result: int
    turn: int
    call: int


def _answers(result: Message, call: ToolCall) -> bool:
    if result.call_id and call.id:
        return result.call_id == call.id
    return not (result.name and call.name) or result.name == call.name


def pair(messages: Sequence[Message]) -> list[Pair]:
    """Every tool result with its call. Raises `BadRecord` with the index of a result that has none."""
    waiting: list[tuple[int, int, ToolCall]] = []  # nearest turn first, its calls in their order
    pairs: list[Pair] = []
    for index, message in enumerate(messages):
        if message.role == "assistant" or message.tool_calls:
            waiting[:0] = [(index, number, call) for number, call in enumerate(message.tool_calls)]
        if message.role != "tool":
            continue
        found = next((w for w in waiting if _answers(message, w[2])), None)
        if found is None:
            named = f" {message.call_id!r}" if message.call_id else ""
            raise BadRecord(f"message {index}: a tool result{named} without a call")
        waiting.remove(found)
        pairs.append(Pair(result=index, turn=found[0], call=found[1]))
    return pairs
