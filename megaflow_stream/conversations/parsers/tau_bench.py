"""tau-bench: runs of an agent, `{"task_id", "traj": [chat messages], "reward", "info", "trial"}`, and its few-shot
files, `{"messages_display": "user: ...\\nassistant: ..."}`.

The display form shows a tool's result and not the call that led to it (`assistant: None`). Nothing is invented: the
conversation is read as it stands, and its metadata says that calls are missing, so that it is not trained on.
https://github.com/sierra-research/tau-bench
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from megaflow_stream.conversations.canonical import Conversation, Message, Role
from megaflow_stream.conversations.identity import ID_KEYS, identify
from megaflow_stream.conversations.parsers.content import json_text, left_over, writable
from megaflow_stream.conversations.parsers.openai_chat import plain_messages, read_messages
from megaflow_stream.errors import BadRecord

NAME = "tau_bench"
_DOCUMENT = frozenset(("traj", "messages_display", "reward", "tools", *ID_KEYS))
_TURN = re.compile(r"^(system|user|assistant|tool): ?", re.MULTILINE)
_NO_CONTENT = "None"


def matches(document: Mapping[str, Any]) -> bool:
    """A list `traj`, or a text `messages_display`."""
    return isinstance(document.get("traj"), list) or isinstance(document.get("messages_display"), str)


def parse(document: Mapping[str, Any], dataset: str) -> Conversation:
    """The canonical conversation. Raises `BadRecord` with the index of the message that cannot be read."""
    metadata = left_over(document, _DOCUMENT)
    if "traj" in document:
        messages, extra = read_messages(document["traj"], "traj")
        if extra:
            metadata["message_fields"] = extra
    else:
        messages, missing = _display(document.get("messages_display"))
        if missing:
            metadata["calls_not_recorded"] = missing
    reward = document.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, (int, float))):
        raise BadRecord(f"the reward is {type(reward).__name__}, not a number")
    tools = json_text(document.get("tools"), "tools")
    return Conversation(
        id=identify(document, dataset, messages, tools),
        dataset=dataset,
        messages=messages,
        tools=tools,
        reward=None if reward is None else float(reward),
        metadata=metadata,
        format=NAME,
    )


def plain(document: Mapping[str, Any]) -> bool:
    """True only where `parse` is sure to succeed, as it is for nearly every good run."""
    reward = document.get("reward")
    return (
        plain_messages(document.get("traj"))
        and (reward is None or type(reward) in (int, float))
        and writable(document.get("tools"))
    )


def _display(shown: object) -> tuple[list[Message], int]:
    """The turns of a display text, and how many tool results have no recorded call."""
    if not isinstance(shown, str):
        raise BadRecord(f"messages_display is {type(shown).__name__}, not a text")
    marks = list(_TURN.finditer(shown))
    if shown.strip() and (not marks or marks[0].start() != 0):
        raise BadRecord("message 0: messages_display does not start with `user: `, `assistant: ` or another speaker")
    messages: list[Message] = []
    missing = 0
    for mark, end in zip(marks, [m.start() for m in marks[1:]] + [len(shown)], strict=True):
        text = shown[mark.end() : end]
        if end != len(shown):
            text = text.removesuffix("\n")
        role = cast(Role, mark[1])
        missing += role == "tool"
        messages.append(Message(role=role, content="" if role == "assistant" and text == _NO_CONTENT else text))
    return messages, missing
