"""A canonical conversation written in a dialect: the inverse of the parsers, for samples and tests."""

from __future__ import annotations

from typing import Any

import orjson

from megaflow_stream.conversations.canonical import Conversation, Message
from megaflow_stream.errors import SettingError

_SHAREGPT = {"system": "system", "developer": "developer", "user": "human", "assistant": "gpt", "tool": "observation"}


def write(conversation: Conversation, dialect: str) -> dict[str, Any]:
    """The document of a dialect; without an id of its own where `conversation.id` is empty."""
    writers = {"openai_chat": _openai_chat, "sharegpt": _sharegpt, "tau_bench": _tau_bench}
    if dialect not in writers:
        raise SettingError(f"conversations are not written as {dialect!r}; known are {', '.join(writers)}")
    document: dict[str, Any] = {"id": conversation.id} if conversation.id else {}
    return document | writers[dialect](conversation)


def _openai_chat(conversation: Conversation) -> dict[str, Any]:
    document: dict[str, Any] = {"messages": [_chat(message) for message in conversation.messages]}
    if conversation.tools:
        document["tools"] = orjson.loads(conversation.tools)
    return document | dict(conversation.metadata)


def _chat(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["content"] = message.content or None
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.call_id:
        out["tool_call_id"] = message.call_id
    if message.name:
        out["name"] = message.name
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    return out


def _sharegpt(conversation: Conversation) -> dict[str, Any]:
    """There is no place for ids of calls, names of results and reasoning; text before a call is a turn of its own."""
    document: dict[str, Any] = {}
    messages = list(conversation.messages)
    if messages and messages[0].role == "system" and messages[0].content:
        document["system"] = messages.pop(0).content
    turns: list[dict[str, str]] = []
    for message in messages:
        if message.content or not message.tool_calls:
            turns.append({"from": _SHAREGPT[message.role], "value": message.content})
        if message.tool_calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            value = calls if len(calls) > 1 else calls[0]
            turns.append({"from": "function_call", "value": orjson.dumps(value).decode()})
    document["conversations"] = turns
    if conversation.tools:
        document["tools"] = conversation.tools
    return document | dict(conversation.metadata)


def _tau_bench(conversation: Conversation) -> dict[str, Any]:
    document: dict[str, Any] = {"traj": [_chat(message) for message in conversation.messages]}
    if conversation.reward is not None:
        document["reward"] = conversation.reward
    if conversation.tools:
        document["tools"] = orjson.loads(conversation.tools)
    return dict(conversation.metadata) | document
