"""OpenAI chat: `{"messages": [{"role", "content", ...}], "tools": [...]}`, with the legacy functions.

https://platform.openai.com/docs/api-reference/chat and the fine-tuning format of the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaflow_stream.conversations.canonical import Conversation, Message, Role, ToolCall
from megaflow_stream.conversations.identity import ID_KEYS, identify
from megaflow_stream.conversations.parsers.content import (
    MEDIA,
    NOT_READ,
    json_text,
    left_over,
    only_text,
    string,
    text_and_reasoning,
    writable,
)
from megaflow_stream.errors import BadRecord

NAME = "openai_chat"
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_FIELDS = frozenset(
    (
        "role",
        "content",
        "tool_calls",
        "function_call",
        "tool_call_id",
        "name",
        "refusal",
        "reasoning",
        "reasoning_content",
    )
)
_RARE = frozenset(("function_call", "refusal", "reasoning", "reasoning_content"))
_PLAIN = frozenset(("role", "content", "tool_calls", "tool_call_id", "name"))
_DOCUMENT = frozenset(("messages", "tools", *ID_KEYS))


def matches(document: Mapping[str, Any]) -> bool:
    """A list `messages` whose first entry, if any, has a role."""
    messages = document.get("messages")
    return isinstance(messages, list) and (not messages or (isinstance(messages[0], dict) and "role" in messages[0]))


def parse(document: Mapping[str, Any], dataset: str) -> Conversation:
    """The canonical conversation. Raises `BadRecord` with the index of the message that cannot be read."""
    only_text(document)
    messages, extra = read_messages(document.get("messages"), "messages")
    metadata = left_over(document, _DOCUMENT)
    offered = document.get("tools")
    if not offered:
        offered = metadata.pop("functions", None)
    tools = json_text(offered, "tools")
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


def plain(document: Mapping[str, Any]) -> bool:
    """True only where `parse` is sure to succeed, as it is for nearly every good document."""
    return (
        MEDIA.isdisjoint(document)
        and plain_messages(document.get("messages"))
        and writable(document.get("tools") or document.get("functions"))
    )


def plain_messages(raw: object) -> bool:
    """True only where `read_messages` is sure to succeed."""
    if type(raw) is not list:
        return False
    for item in raw:
        if type(item) is not dict:
            return False
        get = item.get
        role, content = get("role"), get("content")
        if type(role) is not str or role not in ROLES or (type(content) is not str and content is not None):
            return False
        if len(item) == 2 and content is not None:
            continue
        name, call_id, calls = get("name"), get("tool_call_id"), get("tool_calls")
        if (
            not _PLAIN.issuperset(item)
            or (type(name) is not str and name is not None)
            or (type(call_id) is not str and call_id is not None)
            or (calls is not None and not _plain_calls(calls))
        ):
            return False
    return True


def _plain_calls(calls: object) -> bool:
    if type(calls) is not list:
        return False
    for call in calls:
        if type(call) is not dict or "custom" in call or type(call.get("id")) is not str:
            return False
        function = call.get("function")
        if type(function) is not dict:
            return False
        name = function.get("name")
        if type(name) is not str or not name or type(function.get("arguments")) is not str:
            return False
    return True


def read_messages(raw: object, name: str) -> tuple[list[Message], dict[str, Any]]:
    """Messages of this shape, and the fields of each (by its index) that the canonical form has no place for."""
    if not isinstance(raw, list):
        raise BadRecord(f"{name} is {type(raw).__name__}, not a list")
    messages: list[Message] = []
    extra: dict[str, Any] = {}
    for index, item in enumerate(raw):
        if not isinstance(item, dict):
            raise BadRecord(f"message {index}: {type(item).__name__}, not an object")
        if len(item) == 2:  # a role and a text are all that most messages have
            role, content = item.get("role"), item.get("content")
            if type(role) is str and type(content) is str and role in ROLES:
                messages.append(Message(role=ROLES[role], content=content))
                continue
        messages.append(_message(item, index))
        if not _FIELDS.issuperset(item):
            fields = left_over(item, _FIELDS)
            if fields.get("audio"):
                raise BadRecord(f"message {index}: audio is not text: {NOT_READ}")
            if fields:
                extra[str(index)] = fields
    return messages, extra


def _message(item: Mapping[str, Any], index: int) -> Message:
    role = item.get("role")
    known = ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise BadRecord(f"message {index}: unknown role {role!r}; known are {', '.join(ROLES)}")
    get = item.get
    content, name, call_id = get("content"), get("name"), get("tool_call_id")
    reasoning = ""
    if type(content) is not str:
        content, reasoning = text_and_reasoning(content, index)
    calls = () if (found := get("tool_calls")) is None else _calls(found, index)
    if type(call_id) is not str:
        call_id = string(call_id, "message ", index, ": tool_call_id")
    if type(name) is not str:
        name = string(name, "message ", index, ": name")
    if not _RARE.isdisjoint(item):
        if (found := get("function_call")) is not None:
            calls = (*calls, _function(found, "", "message ", index, ": function_call"))
        if found := string(get("refusal"), "message ", index, ": refusal"):
            content = f"{content}\n{found}" if content else found
        for key in ("reasoning", "reasoning_content"):
            if found := string(get(key), "message ", index, ": ", key):
                reasoning = f"{reasoning}\n{found}" if reasoning else found
    return Message(role=known, content=content, tool_calls=calls, reasoning=reasoning, name=name, call_id=call_id)


def _calls(listed: object, index: int) -> tuple[ToolCall, ...]:
    if not isinstance(listed, (list, tuple)):
        raise BadRecord(f"message {index}: tool_calls is {type(listed).__name__}, not a list")
    calls: list[ToolCall] = []
    for number, call in enumerate(listed):
        if type(call) is dict and "custom" not in call:  # nearly all there are
            call_id, function = call.get("id"), call.get("function")
            if type(call_id) is str and type(function) is dict:
                name, arguments = function.get("name"), function.get("arguments")
                if type(name) is str and name and type(arguments) is str:
                    calls.append(ToolCall(name=name, arguments=arguments, id=call_id))
                    continue
        where = ("message ", index, ": tool call ", number)
        if not isinstance(call, dict):
            raise BadRecord(f"message {index}: tool call {number} is {type(call).__name__}, not an object")
        call_id = string(call.get("id"), *where, ": id")
        if custom := call.get("custom"):
            if not isinstance(custom, dict):
                raise BadRecord(
                    f"message {index}: tool call {number}: custom is {type(custom).__name__}, not an object"
                )
            calls.append(_function({**custom, "arguments": custom.get("input")}, call_id, *where))
        else:
            calls.append(_function(call.get("function"), call_id, *where))
    return tuple(calls)


def _function(function: object, call_id: str, *where: object) -> ToolCall:
    if not isinstance(function, dict):
        raise BadRecord(f"{''.join(map(str, where))} has no function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRecord(f"{''.join(map(str, where))} has no name")
    return ToolCall(name=name, arguments=json_text(function.get("arguments"), *where, ": arguments"), id=call_id)
