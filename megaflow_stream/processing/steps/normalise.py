"""A producer's own document -> one canonical conversation, or why not."""

from __future__ import annotations

from dataclasses import replace

import orjson

from megaflow_stream.conversations.canonical import Conversation
from megaflow_stream.conversations.detect import AUTO, parse
from megaflow_stream.conversations.validate import check, drop_reason
from megaflow_stream.errors import BadRecord, MegaflowError

DEFAULT_DATASET = "agent"


class Unwanted(Exception):
    """A sound conversation that is not trained on; `reason` is a name to count by."""

    def __init__(self, reason: str, conversation: str) -> None:
        super().__init__(reason)
        self.reason, self.conversation = reason, conversation


def normalise(value: bytes | None, *, key: bytes | None, dataset: str = "", format: str = "") -> Conversation:
    """Parses one record of `conversations.raw`.

    value: the document, JSON as its producer wrote it. key: the conversation's id where the record has one; it wins
    over the document's. dataset: "" is "agent". format: the dialect's name; "" detects it by content.

    Raises `BadRecord` for what cannot be understood or contradicts itself, `Unwanted` for what is not trained on.
    """
    if not value:
        raise BadRecord("the record has no value")
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRecord(f"a conversation is a JSON object, this is a {type(document).__name__}")
    try:
        conversation = parse(document, dataset or DEFAULT_DATASET, format or AUTO)
        if key:
            conversation = replace(conversation, id=key.decode(errors="replace"))
        check(conversation)
    except BadRecord:
        raise
    except (MegaflowError, RecursionError) as error:
        raise BadRecord(f"not a conversation: {error}") from error
    if reason := drop_reason(conversation):
        raise Unwanted(reason, conversation.id)
    return conversation
