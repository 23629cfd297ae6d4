"""What `megaflow run --input` says of input that is not there, is empty, or holds no conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_stream.cli import main as entry
from megaflow_stream.project.scaffold import init
from megaflow_stream.publishing.publish import publish
from megaflow_stream.publishing.report import Report
from megaflow_stream.runtime.report import about_input, sentence

GOOD = b'{"messages":[{"role":"user","content":"Hi"}]}\n'


def test_an_input_that_is_not_there_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = init(tmp_path / "demo")
    missing = tmp_path / "missing.jsonl"
    assert entry.run(["run", "--until-idle", "--input", str(missing), "--project", str(root)]) == 2
    assert f"error: there is no file {missing}" in capsys.readouterr().err
    assert not (root / ".megaflow").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"a.jsonl": b""}, ["there is no conversation"]),
        ({}, ["there is no conversation"]),
        ({"LICENSE": b"You may."}, ["left alone: ", "there is no conversation"]),
        ({"a.jsonl": b'{"x": 1}\n'}, ["refused: ", "there is no conversation"]),
        ({"a.jsonl": GOOD + b"{\n" * 7}, ["refused: "] * 5 + ["and 2 more refused"]),
        ({"a.jsonl": GOOD}, []),
    ],
)
async def test_what_a_run_says_of_its_input(tmp_path: Path, content: dict[str, bytes], says: list[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, data in content.items():
        (folder / name).write_bytes(data)
    found = about_input(await publish(None, [folder], dry_run=True), [str(folder)])
    assert len(found) == len(says), found
    assert all(line.startswith(said) for line, said in zip(found, says, strict=True)), found
    assert [sentence("input", {"note": line}) for line in found] == found
    if "there is no conversation" in says:
        assert str(folder) in found[-1]


async def test_a_named_file_that_is_no_conversations_is_refused_with_its_reason(tmp_path: Path) -> None:
    noise = tmp_path / "noise.bin"
    noise.write_bytes(bytes(range(256)) * 20)
    first, last = about_input(await publish(None, [noise], dry_run=True), [str(noise)])
    assert first.startswith(f"refused: {noise}:")
    assert "neither JSON" in first
    assert last == f"there is no conversation that could be published in {noise}"


def test_the_samples_of_the_project_are_not_complained_of() -> None:
    assert about_input(Report(rejected=3), []) == []
