"""The samples in the repository are what the generator gives, and hold what they promise."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import orjson
import pytest

from megaflow_stream.conversations import detect, synthetic
from megaflow_stream.conversations.canonical import content_hash
from megaflow_stream.conversations.files import Document, read, sources
from megaflow_stream.conversations.scenes.stage import Stage
from megaflow_stream.conversations.validate import check, drop_reason
from megaflow_stream.errors import BadRecord

FOLDER = Path(__file__).resolve().parents[2] / "topics" / "samples"


@pytest.mark.parametrize("sample", synthetic.SAMPLES, ids=lambda sample: sample.name)
def test_the_files_are_what_the_generator_gives(sample: synthetic.Sample) -> None:
    data = (FOLDER / sample.name).read_bytes()
    if sample.name.endswith(".gz"):
        data = gzip.decompress(data)
    assert data == synthetic.content(sample), "python -m megaflow_stream.conversations.synthetic topics/samples"


def test_the_samples_hold_what_they_promise() -> None:
    outcomes: Counter[str] = Counter()
    contents: Counter[bytes] = Counter()
    turns = 0
    for source in sources([FOLDER]):
        for item in read(source):
            if not isinstance(item, Document):
                outcomes["rejected"] += 1
                continue
            try:
                conversation = detect.parse(item.document, "agent")
            except BadRecord:
                outcomes["rejected"] += 1
                continue
            try:
                check(conversation)
            except BadRecord:
                outcomes["dead"] += 1
                continue
            reason = drop_reason(conversation)
            outcomes[reason or conversation.format] += 1
            if reason is None:
                contents[content_hash(conversation.messages, conversation.tools)] += 1
                turns += sum(m.role in ("user", "assistant") for m in conversation.messages)
    assert outcomes["rejected"] == 6
    assert outcomes["dead"] >= 5
    assert outcomes["no_assistant_turn"] >= 3
    assert outcomes["empty_assistant"] >= 1
    assert min(outcomes[name] for name in ("openai_chat", "sharegpt", "tau_bench")) >= 150
    assert contents.total() >= 600
    assert 20 <= contents.total() - len(contents) <= 80, "exact duplicates"
    assert 3 <= turns / contents.total() <= 8
    assert sum(len(synthetic.content(sample)) for sample in synthetic.SAMPLES) < 2_000_000


def test_personal_data_belongs_to_nobody() -> None:
    text = b"".join(synthetic.content(sample) for sample in synthetic.SAMPLES).decode()
    assert text.count("@example.") > 20
    assert text.count("@") == text.count("@example.")
    assert " 555" in text


def test_cards_have_a_right_check_digit() -> None:
    import random

    stage = Stage(random.Random(1))
    for _ in range(200):
        digits = [int(d) for d in stage.card() if d != " "]
        assert len(digits) == 16
        luhn = sum(d if at % 2 else 2 * d - 9 * (d > 4) for at, d in enumerate(digits))
        assert luhn % 10 == 0


def test_documents_are_seeded_varied_and_good() -> None:
    first = [orjson.dumps(document) for document in synthetic.documents(2000, seed=3)]
    assert first == [orjson.dumps(document) for document in synthetic.documents(2000, seed=3)]
    assert first[:5] != [orjson.dumps(document) for document in synthetic.documents(5, seed=4)]
    seen = set()
    for data in first:
        conversation = detect.parse(orjson.loads(data), "agent")
        check(conversation)
        assert drop_reason(conversation) is None
        seen.add(content_hash(conversation.messages, conversation.tools))
    assert len(seen) > 1950
