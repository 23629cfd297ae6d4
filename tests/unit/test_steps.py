"""The two handlers of the reference processors, on batches as the engine gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from megaflow_stream.conversations import files
from megaflow_stream.conversations.canonical import Conversation, Message, content_hash, from_json, to_json
from megaflow_stream.conversations.files import Document
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.processor import Handler, Processor, Result
from megaflow_stream.errors import SettingError
from megaflow_stream.features.record import decode
from megaflow_stream.features.tokenizer import train
from megaflow_stream.processing.steps.clean import Clean
from megaflow_stream.processing.steps.features import Features, is_validation
from tests.unit.features_samples import TEXTS, tokenizer

ROOT = Path(__file__).parents[2]
FIRST_HELD_OUT = [38, 62, 94, 96, 109, 121, 126, 141, 143]


def batch(
    rows: Sequence[tuple[bytes | None, bytes | None]],
    headers: dict[str, Sequence[bytes | None]] | None = None,
    first: int = 0,
) -> pa.RecordBatch:
    """A batch of partition 2 with rows (key, value); offsets have gaps."""
    columns: dict[str, pa.Array] = {
        "offset": pa.array([first + 3 * i for i in range(len(rows))], pa.int64()),
        "timestamp": pa.array([1] * len(rows), pa.int64()),
        "key": pa.array([key for key, _ in rows], pa.binary()),
        "value": pa.array([value for _, value in rows], pa.binary()),
    }
    for name, values in (headers or {}).items():
        columns[f"header:{name}"] = pa.array(values, pa.binary())
    return pa.record_batch(columns).replace_schema_metadata({"topic": "conversations.raw", "partition": "2"})


def chat(*texts: str) -> bytes:
    roles = ("user", "assistant")
    return orjson.dumps({"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]})


def clean_rows(result: Result) -> list[dict[str, Any]]:
    output = result.outputs.get("conversations.clean")
    rows: list[dict[str, Any]] = output.to_pylist() if output is not None else []
    return rows


def test_clean_masks_keys_by_content_and_names_the_source() -> None:
    rows = [(b"a", chat("I am mia@example.org", "Hi.")), (b"b", chat("I am bob@example.org", "Hi."))]
    headers = {"dataset": [b"support", None], "producer": [b"web", None], "traceparent": [b"00-1", None]}
    result = Clean()()(batch(rows, headers))
    one, other = clean_rows(result)
    assert from_json(one["value"]).messages[0].content == "I am <email_1>"
    assert one["key"] == content_hash(from_json(one["value"]).messages)
    assert one["key"] == other["key"], "two that differ in what is masked alone are duplicates"
    assert (one["header:conversation"], one["header:dataset"], one["header:producer"]) == ("a", "support", "web")
    assert (one["header:source"], one["header:traceparent"]) == ("conversations.raw/2/0", b"00-1")
    assert (other["header:dataset"], other["header:producer"], other["header:source"]) == (
        "agent",
        None,
        "conversations.raw/2/3",
    )


def test_clean_drops_rejects_and_counts() -> None:
    rows = [
        (b"good", chat("Mail mia@example.org, phone 2025550199", "Yes.")),
        (b"half", chat("Hello?")),
        (b"bad", b"{"),
        (None, chat("No key", "Fine.")),
    ]
    result = Clean()()(batch(rows, {"producer": [b"web"] * 4}))
    assert [row["header:source"][-1] for row in clean_rows(result)] == ["0", "9"]
    assert [tuple(item) for item in result.dropped] == [(3, "half", "no_assistant_turn")]
    ((offset, error, conversation),) = result.rejected
    assert (offset, conversation) == (6, "bad")
    assert "not JSON" in error
    (statistic,) = result.statistics
    assert (statistic.dataset, statistic.producer) == ("agent", "web")
    assert statistic.counts == {
        "conversations_in": 4,
        "conversations_out": 2,
        "dropped": 1,
        "rejected": 1,
        "redactions": 2,
        "redactions_email": 1,
        "redactions_phone": 1,
        "messages": 4,
        "bytes": sum(len(value or b"") for _, value in rows),
    }


@pytest.mark.parametrize("depth", [300, 900])
def test_metadata_nested_too_deep_is_rejected_not_a_crash(depth: int) -> None:
    value = chat("Hello?", "Yes.")[:-1] + b',"metadata":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    ((offset, error, _),) = Clean()()(batch([(b"deep", value)])).rejected
    assert offset == 0
    assert "nested" in error or "JSON" in error


def test_clean_of_nothing_good_writes_nothing() -> None:
    assert Clean()()(batch([(b"bad", b"[")])).outputs == {}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train(TEXTS, 400))
    return lambda **options: Features(tokenizer=path, **options)()


def conversations(count: int, *, words: int = 5, dataset: str = "agent") -> list[Conversation]:
    return [
        Conversation(
            id=f"c-{i}",
            dataset=dataset,
            messages=[
                Message(role="user", content=f"Question {i}"),
                Message(role="assistant", content=f"Answer {i} " + "and more " * words),
            ],
        )
        for i in range(count)
    ]


def clean_batch(many: Sequence[Conversation], producers: Sequence[bytes | None] | None = None) -> pa.RecordBatch:
    return batch(
        [(content_hash(one.messages), to_json(one)) for one in many],
        {
            "conversation": [one.id.encode() for one in many],
            "dataset": [one.dataset.encode() for one in many],
            "producer": producers or [None] * len(many),
        },
    )


def test_features_hold_each_conversation_once_in_its_split(make: Any) -> None:
    many = conversations(300)
    result = make(block_tokens=64)(clean_batch(many))
    found: dict[str, list[str]] = {
        topic: [name for row in rows.to_pylist() for name in decode(row["value"]).conversations]
        for topic, rows in result.outputs.items()
    }
    held_out = {one.id for one in many if is_validation(one.id, 0.05)}
    assert 5 < len(held_out) < 30
    assert sorted(found["features.agent.validation"]) == sorted(held_out)
    assert sorted(found["features.agent"]) == sorted({one.id for one in many} - held_out)


def test_features_headers_and_counts_agree_with_the_records(make: Any) -> None:
    many = conversations(40, words=3) + conversations(1, words=200)
    result = make(block_tokens=128)(clean_batch(many, [b"web"] * 20 + [b"app"] * 21))
    rows = [row for output in result.outputs.values() for row in output.to_pylist()]
    sequences = [decode(row["value"]) for row in rows]
    for row, sequence in zip(rows, sequences, strict=True):
        assert "key" not in row
        assert row["header:tokens"] == str(len(sequence.tokens))
        assert row["header:trainable"] == str(sequence.trainable)
        assert row["header:conversations"] == str(len(set(sequence.conversations)))
        assert row["header:tokenizer"] == sequence.tokenizer == tokenizer().hash
        assert sequence.trainable > 0
    total: Counter[str] = Counter()
    for statistic in result.statistics:
        total.update(statistic.counts)
    assert total["conversations"] == 41
    assert total["sequences"] == len(sequences)
    assert total["tokens"] == sum(len(s.tokens) for s in sequences)
    assert total["trainable_tokens"] == sum(s.trainable for s in sequences)
    assert total["padding_tokens"] == 128 * len(sequences) - total["tokens"]
    assert total["truncated"] == 1
    assert {s.producer: s.counts.get("conversations") for s in result.statistics} == {"web": 20, "app": 21, "": None}


def test_features_of_the_same_batch_are_the_same_bytes(make: Any) -> None:
    many = conversations(50)
    one, other = (make()(clean_batch(many)).outputs for _ in range(2))
    assert {k: v.to_pylist() for k, v in one.items()} == {k: v.to_pylist() for k, v in other.items()}


def test_features_reject_what_has_no_topic_and_what_is_not_canonical(make: Any) -> None:
    wrong = replace(conversations(1)[0], id="x", messages=[Message(role="user", content=7)])  # type: ignore[arg-type]
    many = [*conversations(1), *conversations(1, dataset="support"), wrong]
    result = make()(clean_batch(many))
    assert [(item.offset, item.conversation) for item in result.rejected] == [(3, "c-0"), (6, "x")]
    assert "no topic is declared for the dataset 'support'" in result.rejected[0].error
    assert "datasets" in result.rejected[0].error
    assert "are texts" in result.rejected[1].error
    assert sum(s.counts.get("rejected", 0) for s in result.statistics) == 2
    assert [topic.split(".")[1] for topic in result.outputs] == ["agent"]
    assert len(make(datasets=("agent", "support"))(clean_batch(many)).rejected) == 1


def test_no_sample_without_a_trainable_token(make: Any) -> None:
    silent = replace(conversations(1)[0], messages=[Message(role="user", content="Hello?")])
    far = replace(
        conversations(1)[0],
        id="far",
        messages=[Message(role="user", content="word " * 900), Message(role="assistant", content="Yes.")],
    )
    result = make(block_tokens=64, validation_share=0.0)(clean_batch([silent, far]))
    assert [tuple(item) for item in result.dropped] == [(0, "c-0", "no_trainable_token")]
    ((row),) = result.outputs["features.agent"].to_pylist()
    assert tokenizer().decode(decode(row["value"]).tokens) == "<|begin|><|assistant|>Yes.<|end|>"


def test_the_split_is_by_id_alone() -> None:
    # Fixed values: a change of the hash would move conversations from validation into training.
    assert [i for i in range(200) if is_validation(f"c-{i}", 0.05)] == FIRST_HELD_OUT
    share = sum(is_validation(f"id {i}", 0.05) for i in range(20_000)) / 20_000
    assert 0.045 < share < 0.055
    assert not is_validation("c-1", 0.0)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(SettingError, match="validation_share"):
        Features(tokenizer=Path("x"), validation_share=5)
    with pytest.raises(SettingError, match="block_tokens"):
        Features(tokenizer=Path("x"), block_tokens=1)


def declared() -> dict[str, Processor]:
    return {p.name: p for p in definitions(ROOT / "processors" / "data_preprocess.py", Processor)}


def test_the_reference_processors_fit_together() -> None:
    found = declared()
    assert list(found) == ["clean", "features"]
    assert found["features"].source == found["clean"].sinks[0].topic
    assert found["clean"].sinks[0].partition == "key"
    assert [sink.topic for sink in found["features"].sinks] == ["features.{dataset}", "features.{dataset}.validation"]
    assert found["features"].state is not None
    assert found["features"].linger_seconds > 0


def through(handlers: dict[str, Handler], documents: Sequence[bytes]) -> tuple[Result, Result]:
    cleaned = handlers["clean"](batch([(f"doc-{i}".encode(), value) for i, value in enumerate(documents)]))
    rows = cleaned.outputs["conversations.clean"]
    names = ["offset", *rows.schema.names]
    columns = [pa.array(range(rows.num_rows), pa.int64()), *(column.cast(pa.binary()) for column in rows.columns)]
    return cleaned, handlers["features"](pa.record_batch(columns, names))


def test_real_conversations_go_through_both(real_data: Path) -> None:
    """All of tau-bench: every conversation comes out, masked, or is named with its reason."""
    sources = files.sources([real_data / "tau-bench"])
    documents = [item.raw for source in sources for item in files.read(source) if isinstance(item, Document)]
    assert len(documents) > 250
    cleaned, packed = through({name: p.build() for name, p in declared().items()}, documents)
    rows = clean_rows(cleaned)
    assert not cleaned.rejected
    assert len(rows) + len(cleaned.dropped) == len(documents)
    assert len(rows) >= 200
    assert b"@example.com" not in b"".join(row["value"] for row in rows)
    assert {item.reason for item in cleaned.dropped} == {"calls_not_recorded"}
    # Its digit runs are order numbers, payment ids, prices and times: none may be taken for a card or a phone.
    (statistic,) = cleaned.statistics
    assert "redactions_card" not in statistic.counts
    assert "redactions_phone" not in statistic.counts

    assert not packed.rejected
    found = Counter[str]()
    for output in packed.outputs.values():
        for row in output.to_pylist():
            sequence = decode(row["value"])
            assert len(sequence.tokens) <= 512
            assert sequence.trainable > 0
            found.update(set(sequence.conversations))
    assert set(found) | {item.conversation for item in packed.dropped} == {row["header:conversation"] for row in rows}
