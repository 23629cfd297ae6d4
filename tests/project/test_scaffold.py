"""`megaflow init`: the scaffold from a clone and from a wheel's package data, and the reference project itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import megaflow_stream
from megaflow_stream.cli import main as entry
from megaflow_stream.conversations.canonical import Conversation, Message, to_json
from megaflow_stream.definitions.pipeline import Machine
from megaflow_stream.errors import SettingError, UsageError
from megaflow_stream.project.check import check
from megaflow_stream.project.folder import find
from megaflow_stream.project.scaffold import FOLDERS, init, source

CLONE = Path(__file__).resolve().parents[2]
DECLARED = {
    "conversations.raw",
    "conversations.clean",
    "conversations.dropped",
    "dlq",
    "processing.statistics",
    "dataset.statistics",
    "state.features",
    "features.agent",
    "features.agent.validation",
    "plan.model_finetune",
    "checkpoints",
    "evaluations",
    "control",
    "status",
    "status.events",
    "publish.ledger",
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package laid out as the wheel has it: the scaffold inside, nothing beside."""
    package = tmp_path / "site-packages" / "megaflow_stream"
    for name in FOLDERS:
        shutil.copytree(CLONE / name, package / "scaffold" / name)
    shutil.copy(CLONE / "pipeline.yaml", package / "scaffold")
    return package


def test_a_clone_and_a_wheel_give_the_same_project(tmp_path: Path, wheel: Path) -> None:
    from_clone = init(tmp_path / "clone", CLONE / "megaflow_stream")
    from_wheel = init(tmp_path / "wheel", wheel)
    assert source(CLONE / "megaflow_stream") == CLONE
    assert source(wheel) == wheel / "scaffold"
    assert files(from_clone) == files(from_wheel)
    assert find(from_clone).settings == find(from_wheel).settings
    assert {topic.name for topic in find(from_wheel).topics()} == DECLARED
    assert [stage.name for stage in find(from_wheel).pipeline().stages] == [
        "data_preprocess",
        "model_finetune",
        "evaluation",
    ]


def test_what_it_holds(tmp_path: Path) -> None:
    target = init(tmp_path / "a" / "b")
    assert ".megaflow/" in (target / ".gitignore").read_text().splitlines()
    assert not list(target.rglob("__pycache__"))
    assert {path.name for path in target.iterdir()} == {*FOLDERS, "pipeline.yaml", ".gitignore"}


def test_an_empty_folder_is_taken_and_any_other_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    init(empty)
    before = files(empty)
    with pytest.raises(UsageError, match="not an empty folder"):
        init(empty)
    assert files(empty) == before
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UsageError, match="not an empty folder"):
        init(file)
    assert file.read_text() == "mine"


def test_an_installation_without_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="has no scaffold"):
        init(tmp_path / "new", tmp_path / "package" / "megaflow_stream")
    assert not (tmp_path / "new").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry.run(["init", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"project": str(tmp_path / "demo")}
    assert entry.run(["init", "demo"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert entry.run(["init", "other"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'other'}\n"
    assert "cd other && megaflow run --until-idle" in err


def test_every_declared_topic_says_what_it_is_for() -> None:
    topics = {topic.name: topic for topic in find(CLONE).topics()}
    assert set(topics) == DECLARED
    for topic in topics.values():
        assert topic.purpose.endswith("."), topic.name
        # Only closed segments are compacted, or expire.
        bounded = topic.cleanup == "compact" or topic.retention_bytes != -1
        assert (topic.segment_bytes is not None) == bounded, topic.name
    assert topics["conversations.clean"].partitions == topics["state.features"].partitions
    assert topics["plan.model_finetune"].retention_seconds == -1
    assert topics["dlq"].max_message_bytes > max(
        topic.max_message_bytes for name, topic in topics.items() if name != "dlq"
    )


def test_the_reference_project_fits_together() -> None:
    assert check(find(CLONE), Machine(cpu=2, gpu=0, memory_bytes=8 << 30)) == []


def test_the_package_is_this_clones() -> None:
    assert Path(megaflow_stream.__file__).parent == CLONE / "megaflow_stream"


def test_its_processors_follow_the_datasets_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset is added in pipeline.yaml, or in the environment, and nowhere else."""
    root = init(tmp_path / "demo")
    with (root / "pipeline.yaml").open("a") as file:
        file.write("datasets: [support]\n")
    project = find(root)
    check(project)
    (_, features) = project.processor("features")
    handle = features.build()
    assert set(handle(_conversations("agent", "support")).outputs) == {"features.agent", "features.support"}
    (refused,) = handle(_conversations("coding")).rejected
    assert "no topic is declared for the dataset 'coding'" in refused.error
    assert "agent, support" in refused.error

    monkeypatch.setenv("MEGAFLOW_DATASETS", "coding")
    other = find(init(tmp_path / "other"))
    assert set(other.processor("features")[1].build()(_conversations("coding")).outputs) == {"features.coding"}


def _conversations(*datasets: str) -> pa.RecordBatch:
    """One canonical conversation of each dataset, that goes into training."""
    messages = (Message(role="user", content="Hi"), Message(role="assistant", content="Hello!"))
    values = [to_json(Conversation(id="c-1", dataset=dataset, messages=messages)) for dataset in datasets]
    headers = {
        "header:conversation": [b"c-1"] * len(datasets),
        "header:dataset": [dataset.encode() for dataset in datasets],
        "header:producer": [b"me"] * len(datasets),
    }
    return pa.record_batch({"offset": range(len(datasets)), "value": values, **headers})
