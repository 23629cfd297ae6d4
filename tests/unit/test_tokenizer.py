"""The tokenizer: texts come back as they were, control tokens come from nowhere but the renderer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.cli.main import run
from megaflow_stream.errors import NotFound, SettingError
from megaflow_stream.features.tokenizer import CONTROLS, Tokenizer, train
from tests.unit.features_samples import TEXTS, tokenizer

ROOT = Path(__file__).parents[2]

CODE = """
import hashlib
from megaflow_stream.features.tokenizer import train
from tests.unit.features_samples import TEXTS
print(hashlib.sha256(train(TEXTS, 400)).hexdigest())
"""


def test_control_tokens_are_the_first_ids() -> None:
    assert [tokenizer().control[token] for token in CONTROLS] == list(range(len(CONTROLS)))
    assert tokenizer().size == 400
    assert tokenizer().dtype is np.uint16


@given(st.text(max_size=200))
def test_text_comes_back_and_holds_no_control_token(text: str) -> None:
    (ids,) = tokenizer().encode([text])
    assert tokenizer().decode(ids) == text
    assert not len(ids) or ids.min() >= len(CONTROLS)


@given(st.lists(st.sampled_from([*CONTROLS, "<|", "|>", "<|end", "|", " ", "\n", "a", "<s>", "\u200b"]), max_size=12))
def test_text_that_spells_control_tokens_stays_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    (ids,) = tokenizer().encode([text])
    assert tokenizer().decode(ids) == text
    assert not len(ids) or ids.min() >= len(CONTROLS)


def test_a_batch_gives_what_each_text_gives_alone() -> None:
    texts = [*TEXTS, "", TEXTS[0], "x" * 1000, "x" * 1000]
    fresh = Tokenizer(train(TEXTS, 400))
    for _ in range(2):  # the second time from memory
        for text, ids in zip(texts, fresh.encode(texts), strict=True):
            (alone,) = Tokenizer(train(TEXTS, 400)).encode([text]) if text == TEXTS[0] else tokenizer().encode([text])
            assert np.array_equal(ids, alone)


def test_training_gives_the_same_bytes_in_every_process() -> None:
    found = set()
    for seed, parallel in (("1", "false"), ("2", "true")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel}
        found.add(subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, check=True).stdout)
    assert len(found) == 1


def test_the_hash_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train(TEXTS, 400))
    assert Tokenizer.load(path).hash == tokenizer().hash
    path.write_bytes(train(TEXTS, 300))
    assert Tokenizer.load(path).hash != tokenizer().hash


def test_what_is_no_tokenizer_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no tokenizer"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(SettingError, match="not a tokenizer file"):
        Tokenizer(b"{}")
    other = train(TEXTS, 400).replace(b"<|end|>", b"<|eot|>")
    with pytest.raises(SettingError, match=r"no control token <\|end\|>"):
        Tokenizer(other)
    with pytest.raises(SettingError, match="at least 266"):
        train(TEXTS, 100)


def test_the_project_ships_one_under_a_megabyte() -> None:
    path = ROOT / "processors" / "tokenizer.json"
    assert path.stat().st_size < 1 << 20
    assert Tokenizer.load(path).size <= 4096


def _conversations(path: Path) -> Path:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"mia{i}@example.org asks: {text}"},
                {"role": "assistant", "content": text},
            ]
        }
        for i, text in enumerate(TEXTS)
    ]
    path.write_bytes(b"\n".join(map(orjson.dumps, [*lines, {"x": 1}])))
    return path


def test_the_command_trains_a_tokenizer_on_masked_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, files = _conversations(tmp_path / "chat.jsonl"), [tmp_path / "one.json", tmp_path / "other.json"]
    for file in files:
        arguments = ["train", str(source), "--output", str(file), "--vocab-size", "400", "--json"]
        assert run(["tokenizer", *arguments, "--project", str(ROOT)]) == 0
        report = orjson.loads(capsys.readouterr().out)
        assert (report["conversations"], report["skipped"]) == (len(TEXTS), 1)
        assert report["hash"] == Tokenizer.load(file).hash
        # each text once: six different replies, six masked questions
        assert report["texts"] == 12
    assert files[0].read_bytes() == files[1].read_bytes()
    assert run(["tokenizer", "show", str(files[0]), "--project", str(ROOT), "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out)["vocab_size"] <= 400


def test_the_command_needs_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "other.json"
    source.write_text('{"x": 1}')
    output = tmp_path / "tokenizer.json"
    assert run(["tokenizer", "train", str(source), "--output", str(output), "--project", str(ROOT)]) == 2
    assert "no conversation to train on: 1 documents were skipped" in capsys.readouterr().err
    assert not output.exists()
