"""The pipeline document: the one of the design is valid, and each kind of wrong one is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_stream.config.load import load
from megaflow_stream.definitions.pipeline import Machine, Pipeline, parse_every, warnings
from megaflow_stream.definitions.trainer import CheckpointEvery
from megaflow_stream.errors import SettingError
from megaflow_stream.project.machine import this_machine
from megaflow_stream.project.pipeline_file import read_pipeline

DESIGN = """\
pipeline:
  - name: data_preprocess
    resources: {cpu: 16, memory: 64GiB}
    parallelism: 8
  - name: model_finetune
    resources: {gpu: 4, cpu: 32}
    checkpoint: every 2h
  - name: evaluation
    depends_on: [model_finetune]
    policy: async
"""


def read(tmp_path: Path, text: str) -> Pipeline:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text, encoding="utf-8")
    return read_pipeline(load(tmp_path, environment={}).document, path)


def test_the_document_of_the_design_is_valid(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, DESIGN).stages
    assert (first.name, first.parallelism) == ("data_preprocess", 8)
    assert (first.resources.cpu, first.resources.gpu, first.resources.memory_bytes) == (16, 0, 64 << 30)
    assert second.checkpoint == CheckpointEvery(seconds=7200)
    assert (second.resources.gpu, second.resources.cpu) == (4, 32)
    assert (third.depends_on, third.policy) == (("model_finetune",), "async")


def test_more_than_the_machine_has_is_a_warning_with_both_numbers(tmp_path: Path) -> None:
    found = warnings(read(tmp_path, DESIGN), Machine(cpu=2, gpu=0, memory_bytes=16 << 30))
    assert found == [
        "stage data_preprocess asks for 8 x 16 = 128 CPUs, this machine has 2",
        "stage data_preprocess asks for 8 x 64 = 512 GiB of memory, this machine has 16",
        "stage model_finetune asks for 32 CPUs, this machine has 2",
        "stage model_finetune asks for 4 GPUs, this machine has 0",
    ]
    assert warnings(read(tmp_path, DESIGN), Machine(cpu=128, gpu=4, memory_bytes=1 << 40)) == []


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    machine = this_machine(tmp_path)
    assert machine.gpu == 3
    assert machine.cpu >= 1
    assert machine.memory_bytes > 1 << 28


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("every 2h", CheckpointEvery(seconds=7200)),
        ("every 30s", CheckpointEvery(seconds=30)),
        ("every 200 steps", CheckpointEvery(steps=200)),
        ("every 1 step", CheckpointEvery(steps=1)),
        ("every 500ms", CheckpointEvery(seconds=0.5)),
    ],
)
def test_when_a_checkpoint_is_due(text: str, every: CheckpointEvery) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize(
    "text",
    [
        "2h",
        "every",
        "every ",
        "every 2",
        "every two hours",
        "every 0 steps",
        "every 0s",
        "every 1.5 steps",
        "Every 2h",
        "every 200steps",
        "every -1s",
        30,
        None,
        ["every 2h"],
        "every 2 hours",
    ],
)
def test_a_wrong_interval_names_the_spellings(text: object) -> None:
    with pytest.raises(ValueError, match=r"every 2h.*every 30s.*every 200 steps"):
        parse_every(text)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("kafka:\n", None, "no stages"),
        ("pipeline:\n", 1, "no stages"),
        ("pipeline: []\n", 1, "no stages"),
        ("pipeline: {name: a}\n", 1, "a list of stages"),
        ("pipeline:\n  - a\n", 2, "must be a mapping"),
        ("pipeline:\n  - ranks: 2\n", 2, "has no name"),
        ("pipeline:\n  - name: a-b\n", 2, "cannot be the name"),
        ("pipeline:\n  - name: ../a\n", 2, "cannot be the name"),
        ("pipeline:\n  - name: a\n    paralelism: 2\n", 3, "did you mean parallelism"),
        ("pipeline:\n  - name: a\n    parallelism: 0\n", 3, "at least 1"),
        ("pipeline:\n  - name: a\n    parallelism: many\n", 3, "whole number"),
        ("pipeline:\n  - name: a\n    policy: sometimes\n", 3, "async, sync"),
        ("pipeline:\n  - name: a\n    checkpoint: 2h\n", 3, "every 200 steps"),
        ("pipeline:\n  - name: a\n    resources:\n      memory: 2gi\n", 4, "did you mean Gi"),
        ("pipeline:\n  - name: a\n    resources:\n      disk: 2Gi\n", 4, "known are: cpu, gpu, memory"),
        ("pipeline:\n  - name: a\n    resources: {gpu: 0.5}\n", 3, "whole number"),
        ("pipeline:\n  - name: a\n    resources: {cpu: -1}\n", 3, "at least 0"),
        ("pipeline:\n  - name: a\n    resources: {cpu: .inf}\n", 3, "a number"),
        ("pipeline:\n  - name: a\n    resources: 4\n", 3, "must be a mapping"),
        ("pipeline:\n  - name: a\n    depends_on: b\n", 3, "a list of names"),
        ("pipeline:\n  - name: a\n    depends_on: [b]\n", 2, "which is no stage"),
        ("pipeline:\n  - name: a\n  - name: a\n", 3, "two stages"),
        ("pipeline:\n  - name: a\n    depends_on: [a]\n", 2, "circle through a"),
        (
            "pipeline:\n  - {name: x}\n  - {name: a, depends_on: [b]}\n  - {name: b, depends_on: [a]}\n",
            3,
            "through a, b",
        ),
    ],
)
def test_a_wrong_pipeline_is_refused_with_its_line(tmp_path: Path, text: str, line: int | None, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        read(tmp_path, text)
    assert caught.value.exit_code == 2
    assert caught.value.where["file"] == tmp_path / "pipeline.yaml"
    assert caught.value.where.get("line") == line
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_stages_come_after_what_they_depend_on(tmp_path: Path) -> None:
    text = (
        "pipeline:\n  - {name: c, depends_on: [b, a]}\n  - {name: b, depends_on: [a]}\n  - {name: a}\n  - {name: d}\n"
    )
    pipeline = read(tmp_path, text)
    assert [stage.name for stage in pipeline.ordered()] == ["a", "b", "c", "d"]
    with pytest.raises(SettingError, match="no stage 'e'"):
        pipeline.stage("e")
