"""The parts that dialects share: a message's text, the tools offered, and what is left over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from megaflow_stream.errors import BadRecord

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
REASONING_PARTS = ("reasoning", "thinking")
NOT_READ = "images, audio and files are not read yet"
MEDIA = frozenset(("images", "image", "videos", "video", "audios", "audio"))


# `*what` are the words that an error begins with: they are joined when there is one, not for every field of every
# message.


def json_text(value: object, *what: object) -> str:
    """A JSON text: as it is where it came as a string, encoded once where it came as an object, empty for null."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise BadRecord(f"{_joined(what)} cannot be written as JSON: {error}") from error


def writable(value: object) -> bool:
    """Whether `json_text` takes it."""
    if value is None or type(value) is str:
        return True
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def string(value: object, *what: object) -> str:
    """A string, empty for null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRecord(f"{_joined(what)} is {type(value).__name__}, not a text")
    return value


def _joined(what: tuple[object, ...]) -> str:
    return "".join(map(str, what))


def text_and_reasoning(content: object, index: int) -> tuple[str, str]:
    """A message's content as text, and its reasoning parts. Parts of a list are joined by a line break.

    Raises `BadRecord` for a part that is not text (an image, audio, a file).
    """
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        raise BadRecord(f"message {index}: the content is {type(content).__name__}, neither a text nor a list")
    texts: list[str] = []
    reasoning: list[str] = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        where = f"message {index}: content part {number}"
        if kind in REASONING_PARTS:
            key = next((k for k in (kind, "text", "value") if k in part), kind)
            reasoning.append(string(part.get(key), where))
        elif kind in TEXT_PARTS:
            key = next((k for k in (TEXT_PARTS[kind], "value") if k in part), "")
            if not key:
                raise BadRecord(f"{where} has no {TEXT_PARTS[kind]}")
            texts.append(string(part[key], where))
        else:
            raise BadRecord(f"{where} is {kind!r}, not text: {NOT_READ}")
    return "\n".join(texts), "\n".join(reasoning)


def only_text(document: Mapping[str, Any]) -> None:
    """Raises `BadRecord` for a document that comes with pictures or sound beside its messages."""
    if not MEDIA.isdisjoint(document):
        for key in document:
            if key in MEDIA and document[key]:
                raise BadRecord(f"the conversation comes with {key}: {NOT_READ}")


def left_over(mapping: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """What a mapping says beside the known keys, nulls left out: kept as metadata, never lost."""
    if known.issuperset(mapping):
        return {}
    return {key: value for key, value in mapping.items() if key not in known and value is not None}
