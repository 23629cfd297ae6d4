"""Conversations of our own making: the samples that a project carries, and any number for tests and benchmarks.

    python -m megaflow_stream.conversations.synthetic topics/samples

writes the samples: three dialects, a few exact duplicates, personal data that belongs to nobody, and a few bad records
of each kind, so that a pipeline that runs on them shows its drops, its dead letters and its rejects. The same seed
gives the same bytes. They are regular enough for a small model to learn, and nearly no two are the same.
"""

from __future__ import annotations

import gzip
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from megaflow_stream.conversations.canonical import Conversation
from megaflow_stream.conversations.scenes import FIELDS, Stage
from megaflow_stream.conversations.writing import write

SEED = 20261130
# Of all documents that `documents` gives, in the same shares in which the samples hold them.
_MIX = ("support", "support", "support", "flights", "flights", "coding", "coding", "tools", "tools")
DIALECTS = {"support": "openai_chat", "flights": "tau_bench", "coding": "openai_chat", "tools": "sharegpt"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One file of the samples. `bad` lines are no conversations at all: publishing rejects them."""

    name: str
    field: str
    count: int
    bad: tuple[bytes, ...] = ()


SAMPLES = (
    Sample(
        name="support.jsonl",
        field="support",
        count=330,
        bad=(
            b'{"id":"support-broken","messages":[{"role":"user","content":"Hello, where is my or',
            b'{"id":"support-unknown","question":"Where is my order?","answer":"On its way."}',
            b'{"id":"support-role","messages":[{"role":"user","content":"Hi"},{"role":"robot","content":"Beep"}]}',
        ),
    ),
    Sample(name="flights.json", field="flights", count=200),
    Sample(
        name="coding.jsonl.gz",
        field="coding",
        count=200,
        bad=(
            b'"a line that is JSON, and no conversation"',
            b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"a.png"}}]}]}',
        ),
    ),
    Sample(
        name="tools.json",
        field="tools",
        count=230,
        bad=(b'{"id":9001,"conversations":[{"from":"human","value":"Hi"},{"from":"function_call","value":"?"}]}',),
    ),
)


def conversation(field: str, rng: random.Random) -> Conversation:
    """One conversation of a field, without an id."""
    stage = Stage(rng)
    stage.pick(FIELDS[field])(stage)
    return Conversation(
        id="",
        dataset="",
        messages=stage.messages,
        tools=orjson.dumps(stage.tools).decode() if stage.tools else "",
        reward=stage.reward,
    )


def documents(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Good documents of all fields and dialects, each with an id of its own."""
    rng = random.Random(seed)
    for number in range(count):
        field = _MIX[int(rng.random() * len(_MIX))]
        yield {"id": f"{field}-{seed}-{number}", **write(conversation(field, rng), DIALECTS[field])}


def sample_documents(sample: Sample, seed: int = SEED) -> list[dict[str, Any]]:
    """The documents of one file: in a hundred about four that came before, one that contradicts itself (a tool result
    without its call) and one or two that nothing can be learnt from (no turn of the assistant, or empty ones)."""
    rng = random.Random(f"{seed} {sample.field}")
    found: list[dict[str, Any]] = []
    for number in range(sample.count):
        chance = rng.random()
        if chance < 0.04 and number > 20:
            earlier = found[int(rng.random() * len(found))]
            found.append(earlier if rng.random() < 0.5 else earlier | _identity(sample.field, number))
            continue
        made = conversation(sample.field, rng)
        if chance < 0.052:
            made = _without_call(made)
        elif chance < 0.064:
            made = _without_assistant(made)
        elif chance < 0.068:
            made = _empty_assistant(made)
        document = write(made, DIALECTS[sample.field])
        if sample.field == "flights":
            document |= {"task_id": number // 4, "trial": number % 4}
        found.append(_identity(sample.field, number) | document)
    if sample.field == "tools":
        found[-1]["id"] = found[-3]["id"]  # the same id, another content: both are kept
    return found


def _identity(field: str, number: int) -> dict[str, Any]:
    """Ids as producers give them: a text, a number, under another name, or none."""
    identities: dict[str, dict[str, Any]] = {
        "support": {"id": f"support-{number:05d}"},
        "coding": {"conversation_id": f"coding/{number}"},
        "tools": {"id": number},
    }
    return identities.get(field, {})


def _with(made: Conversation, messages: list[Any]) -> Conversation:
    return Conversation(id="", dataset="", messages=messages, tools=made.tools, reward=made.reward)


def _without_call(made: Conversation) -> Conversation:
    """As a recorder that loses messages leaves it: every call is gone, its result is there."""
    kept = [m for m in made.messages if not m.tool_calls]
    if not any(m.role == "tool" for m in kept):
        return _without_assistant(made)
    return _with(made, kept)


def _without_assistant(made: Conversation) -> Conversation:
    return _with(made, [m for m in made.messages if m.role in ("system", "user")])


def _empty_assistant(made: Conversation) -> Conversation:
    kept = [m for m in made.messages if m.role in ("system", "user") or (m.role == "assistant" and not m.tool_calls)]
    emptied = [type(m)(role=m.role, content="" if m.role == "assistant" else m.content) for m in kept]
    return _with(made, emptied)


def content(sample: Sample, seed: int = SEED) -> bytes:
    """The bytes of a file, before compression."""
    lines = [orjson.dumps(document) for document in sample_documents(sample, seed)]
    for number, bad in enumerate(sample.bad):
        lines.insert((number + 1) * len(lines) // (len(sample.bad) + 1), bad)
    if sample.name.endswith(".json"):
        return b"[\n" + b",\n".join(lines) + b"\n]\n"
    return b"\n".join(lines) + b"\n"


def write_samples(folder: Path, seed: int = SEED) -> list[Path]:
    """Writes every file of the samples; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for sample in SAMPLES:
        data = content(sample, seed)
        path = folder / sample.name
        path.write_bytes(gzip.compress(data, mtime=0) if sample.name.endswith(".gz") else data)
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write_samples(Path(sys.argv[1] if len(sys.argv) > 1 else "topics/samples")):
        print(path, path.stat().st_size)
