"""ShareGPT: `{"conversations": [{"from", "value"}], "system": ..., "tools": ...}`, as FastChat and LLaMA-Factory
write it: a tool call is a turn `function_call` whose value is JSON text, a result is a turn `observation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from megaflow_stream.conversations.canonical import Conversation, Message, Role, ToolCall
from megaflow_stream.conversations.identity import ID_KEYS, identify
from megaflow_stream.conversations.parsers.content import json_text, left_over, only_text, string
from megaflow_stream.errors import BadRecord

NAME = "sharegpt"
SPEAKERS: Mapping[str, Role] = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLS = frozenset(("function_call", "tool_call"))
_FIELDS = frozenset(("from", "value"))
_DOCUMENT = frozenset(("conversations", "system", "tools", *ID_KEYS))


def matches(document: Mapping[str, Any]) -> bool:
    """A list `conversations` whose first entry, if any, says who speaks by `from`."""
    turns = document.get("conversations")
    return isinstance(turns, list) and (not turns or (isinstance(turns[0], dict) and "from" in turns[0]))


def parse(document: Mapping[str, Any], dataset: str) -> Conversation:
    """The canonical conversation. Raises `BadRecord` with the index of the turn that cannot be read."""
    turns = document.get("conversations")
    if not isinstance(turns, list):
        raise BadRecord(f"conversations is {type(turns).__name__}, not a list")
    only_text(document)
    messages: list[Message] = []
    if system := string(document.get("system"), "system"):
        messages.append(Message(role="system", content=system))
    extra: dict[str, Any] = {}
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadRecord(f"message {index}: {type(turn).__name__}, not an object")
        messages.append(_message(turn, index))
        if len(turn) > 2 and (fields := left_over(turn, _FIELDS)):
            extra[str(index)] = fields
    tools = json_text(document.get("tools"), "tools")
    metadata = left_over(document, _DOCUMENT)
    if extra:
        metadata["message_fields"] = extra
    return Conversation(
        id=identify(document, dataset, messages, tools),
        dataset=dataset,
        messages=messages,
        tools=tools,
        metadata=metadata,
        format=NAME,
    )


def _message(turn: Mapping[str, Any], index: int) -> Message:
    speaker = turn.get("from")
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRecord(f"message {index}: unknown speaker {speaker!r}; known are {', '.join(SPEAKERS)}")
    value = turn.get("value")
    if speaker in CALLS:
        return Message(role=role, tool_calls=tuple(_calls(value, index)))
    if type(value) is not str:
        value = string(value, "message ", index, ": value")
    return Message(role=role, content=value)


def _calls(value: object, index: int) -> list[ToolCall]:
    """One call, or a list of them, as JSON text or given as objects."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRecord(f"message {index}: the tool call is not JSON: {error}") from error
    calls: list[ToolCall] = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict):
            raise BadRecord(f"message {index}: the tool call is {type(call).__name__}, not an object")
        name = call.get("name")
        if not isinstance(name, str) or not name:
            raise BadRecord(f"message {index}: the tool call has no name")
        arguments = call.get("arguments", call.get("parameters"))
        calls.append(
            ToolCall(
                name=name,
                arguments=json_text(arguments, "message ", index, ": arguments"),
                id=string(call.get("id"), "message ", index, ": id"),
            )
        )
    return calls
