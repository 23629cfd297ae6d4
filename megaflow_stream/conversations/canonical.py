"""The canonical conversation, version 1. Frozen data; JSON by `to_json` and `from_json`.

Texts, tool arguments and tool schemas stay the strings they came as: nothing is inferred, nothing re-encoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, dataclass_transform

import orjson

from megaflow_stream.errors import BadRecord

SCHEMA = "megaflow.conversation/1"
Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES = ("system", "developer", "user", "assistant", "tool")


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _frozen(cls: type[T]) -> type[T]:
    """A frozen dataclass to whoever checks types. At run time nothing guards it: the guard makes construction take
    three times as long, and a worker constructs a dozen of these for each conversation."""
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


@_frozen
class ToolCall:
    """A call: `arguments` is the JSON text as the model wrote it (an object given as such is encoded once)."""

    name: str
    arguments: str
    id: str = ""


@_frozen
class Message:
    """A turn. `content` may be empty when there are tool calls; `call_id` and `name` are of a tool's result."""

    role: Role
    content: str = ""
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str = ""
    name: str = ""
    call_id: str = ""


@_frozen
class Conversation:
    """One conversation.

    id: the input's own, else `content_id(dataset, messages)`.
    tools: JSON text of the tools offered, empty for none.
    reward: outcome of the run, where the input has one.
    metadata: what else the input said, kept as it was.
    format: the dialect it was parsed from.
    """

    id: str
    dataset: str
    messages: Sequence[Message]
    tools: str = ""
    reward: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    format: str = ""


def _message_json(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls]
    for name in ("reasoning", "name", "call_id"):
        if value := getattr(message, name):
            out[name] = value
    return out


def messages_json(messages: Sequence[Message], tools: str = "") -> bytes:
    """The content alone, in one spelling: what content hashes are taken of."""
    return orjson.dumps({"messages": [_message_json(m) for m in messages], "tools": tools})


def content_hash(messages: Sequence[Message], tools: str = "") -> bytes:
    """16 bytes that name this content, whatever its id or dataset: the key of `conversations.clean`."""
    return hashlib.blake2b(messages_json(messages, tools), digest_size=16).digest()


def content_id(dataset: str, messages: Sequence[Message], tools: str = "") -> str:
    """The id of a conversation that came without one."""
    content = dataset.encode() + b"\0" + messages_json(messages, tools)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def to_json(conversation: Conversation) -> bytes:
    """UTF-8 JSON, one line, keys in a fixed order."""
    return orjson.dumps(
        {
            "id": conversation.id,
            "dataset": conversation.dataset,
            "format": conversation.format,
            "messages": [_message_json(m) for m in conversation.messages],
            "tools": conversation.tools,
            "reward": conversation.reward,
            "metadata": conversation.metadata,
        }
    )


def from_json(data: bytes) -> Conversation:
    """Reads `to_json`'s form. Raises `BadRecord` naming what is wrong."""
    try:
        raw = orjson.loads(data)
        return Conversation(
            id=raw["id"],
            dataset=raw["dataset"],
            format=raw.get("format", ""),
            messages=[
                Message(
                    role=m["role"],
                    content=m.get("content", ""),
                    tool_calls=tuple(
                        ToolCall(name=c["name"], arguments=c["arguments"], id=c.get("id", ""))
                        for c in m.get("tool_calls", ())
                    ),
                    reasoning=m.get("reasoning", ""),
                    name=m.get("name", ""),
                    call_id=m.get("call_id", ""),
                )
                for m in raw["messages"]
            ],
            tools=raw.get("tools", ""),
            reward=raw.get("reward"),
            metadata=raw.get("metadata", {}),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BadRecord(f"not a canonical conversation: {type(error).__name__}: {error}") from error
