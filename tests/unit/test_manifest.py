"""The manifest's document: what is written is read, what does not hold together is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson
import pytest

from megaflow_stream.checkpoint import names
from megaflow_stream.checkpoint.manifest import (
    LineageRef,
    Manifest,
    ManifestRef,
    PieceRef,
    Tensor,
    parse,
    sha256_of,
)
from megaflow_stream.checkpoint.tensor import Box, TensorSpec
from megaflow_stream.errors import Damaged, MegaflowError, SettingError

SPEC = TensorSpec("w", "bfloat16", (2, 3), "trainable")
MANIFEST = Manifest(
    job="job",
    step=7,
    created_ms=1,
    writer="w",
    parent=ManifestRef("jobs/job/manifests/000000000003-01234567.json", "01234567" * 8, 3),
    tensors=[
        Tensor(
            SPEC,
            [
                PieceRef("a" * 64, 6, 4, Box((0, 0), (1, 3))),
                PieceRef("b" * 64, 6, 0, Box((1, 0), (2, 3))),
            ],
        ),
        Tensor(TensorSpec("s", "int64", (), "optimizer"), [PieceRef("c" * 64, 8, 0, Box((), ()))]),
    ],
    state={"offsets": {"features.agent/0": 12}, "plan_cursor": 7, "rng": [1, 2]},
    lineage=LineageRef("d" * 64, 100, 3),
    definition={"tokenizer": "e"},
)


def key_of(data: bytes) -> str:
    return names.manifest("job", 7, sha256_of(data))


def with_json(**changes: Any) -> bytes:
    return orjson.dumps({**orjson.loads(MANIFEST.to_bytes()), **changes})


def test_a_manifest_comes_back_as_it_was() -> None:
    data = MANIFEST.to_bytes()
    again = parse(data, key=key_of(data), sha256=sha256_of(data))
    assert dataclasses.asdict(again) == dataclasses.asdict(MANIFEST)
    assert again.offsets == {"features.agent/0": 12}
    assert again.chunks() == {"a" * 64: 10, "b" * 64: 6, "c" * 64: 8}
    assert again.chunks(["optimizer"]) == {"c" * 64: 8}


def test_bytes_of_another_hash_are_damaged() -> None:
    data = MANIFEST.to_bytes()
    with pytest.raises(Damaged, match="hash"):
        parse(data.replace(b'"step":7', b'"step":8'), key=key_of(data), sha256=sha256_of(data))
    with pytest.raises(Damaged, match="hash"):
        parse(data + b" ", key=key_of(data))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "offsets is missing"),
        ({"offsets": {}}, "offsets is missing"),
        ({"offsets": {"features.agent": 1}}, "TOPIC/PARTITION"),
        ({"offsets": {"features.agent/0": None}}, "number from 0"),
        ({"offsets": {"features.agent/0": -1}}, "number from 0"),
    ],
)
def test_a_manifest_without_offsets_is_an_error(state: dict[str, Any], message: str) -> None:
    data = with_json(state=state)
    with pytest.raises(MegaflowError, match=message):
        parse(data, key=key_of(data))


def test_another_format_says_what_to_do() -> None:
    data = with_json(format="megaflow.checkpoint/9")
    with pytest.raises(MegaflowError, match="checkpoint/9") as raised:
        parse(data, key=key_of(data))
    assert "version" in raised.value.hint


def test_pieces_that_do_not_cover_their_tensor_are_damaged() -> None:
    tensors = orjson.loads(MANIFEST.to_bytes())["tensors"]
    tensors[0]["chunks"].pop()
    data = with_json(tensors=tensors)
    with pytest.raises(Damaged, match="hold 6 bytes of a tensor of 12"):
        parse(data, key=key_of(data))
    tensors[0]["chunks"][0]["bytes"] = 12
    data = with_json(tensors=tensors)
    with pytest.raises(Damaged, match="bytes of its box"):
        parse(data, key=key_of(data))


def test_keys_sort_by_step_and_are_read_back() -> None:
    key = names.manifest("a.b-c", 12, "0123456789abcdef")
    assert key == "jobs/a.b-c/manifests/000000000012-01234567.json"
    assert names.parse_manifest(key) == (12, "01234567")
    assert names.parse_manifest("jobs/x/head.json") is None
    with pytest.raises(SettingError):
        names.head("../other")
