"""The project folder: found from anywhere in it, its definitions by name, and what does not fit together."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megaflow_stream.bus.security import Security
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.pipeline import Machine
from megaflow_stream.errors import SettingError
from megaflow_stream.project.check import check, workers
from megaflow_stream.project.folder import Project, find
from megaflow_stream.project.scaffold import init
from megaflow_stream.training.job import Job, S3Address

LARGE = Machine(cpu=10**6, gpu=10**6, memory_bytes=1 << 60)

PROCESSORS = """\
from megaflow_stream.definitions.processor import Deduplicate, Processor, Sink

def build():
    raise AssertionError("not built here")

clean = Processor(name="clean", source="raw", build=build, sinks=[Sink(topic="mid", partition="key")])
features = Processor(
    name="features", source="mid", build=build, sinks=[Sink(topic="features.{dataset}", format="arrow")],
    state=Deduplicate(changelog="state"),
)
"""
TRAINER = """\
from megaflow_stream.definitions.trainer import Trainer

fit = Trainer(
    name="fit", data="features.agent", validation="validation", tokenizer="tokenizer.json",
    build_model=dict, loss=dict, build_optimizer=dict,
)
"""
EVALUATION = """\
from megaflow_stream.definitions.trainer import Evaluation

judge = Evaluation(name="judge", trainer="fit")
"""
PIPELINE = """\
pipeline:
  - name: prepare
    parallelism: 8
  - name: fit
    checkpoint: every 5 steps
  - name: judge
    depends_on: [fit]
    policy: sync
"""
NAMES = ("raw", "mid", "state", "features.{dataset}", "validation", "plan.fit", "dlq", "conversations.dropped")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("topics", "processors", "trainers"):
        (tmp_path / folder).mkdir()
    for name in (*NAMES, "processing.statistics"):
        partitions = 1 if name == "plan.fit" else 3
        (tmp_path / "topics" / f"{name}.yaml").write_text(f"name: {name}\npartitions: {partitions}\n")
    (tmp_path / "processors" / "prepare.py").write_text(PROCESSORS)
    (tmp_path / "trainers" / "fit.py").write_text(TRAINER)
    (tmp_path / "trainers" / "judge.py").write_text(EVALUATION)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    return tmp_path


def test_it_is_found_from_a_folder_inside(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = root / "topics" / "deep"
    inside.mkdir()
    assert find(inside).root == root
    monkeypatch.chdir(inside)
    assert find().root == root
    assert find().state_dir == root / ".megaflow"


def test_outside_of_one_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        find(tmp_path)
    assert "megaflow init" in caught.value.hint
    with pytest.raises(SettingError, match="no folder"):
        find(tmp_path / "missing")


def test_definitions_by_stage_and_by_name(root: Path) -> None:
    project = find(root)
    assert [project.kind(stage) for stage in project.pipeline().stages] == ["processor", "trainer", "evaluation"]
    assert [processor.name for _, processor in project.processors("prepare")] == ["clean", "features"]
    path, processor = project.processor("features")
    assert (path, processor.source) == (root / "processors" / "prepare.py", "mid")
    assert project.trainer("fit")[1].data == "features.agent"
    assert project.evaluation("judge")[1].trainer == "fit"
    assert not any(entry.startswith(str(root)) for entry in sys.path)


@pytest.mark.parametrize("call", ["processor", "trainer", "evaluation"])
def test_a_name_that_is_not_there_is_answered_with_those_that_are(root: Path, call: str) -> None:
    with pytest.raises(SettingError) as caught:
        getattr(find(root), call)("featurs")
    assert caught.value.hint.startswith(("did you mean", "known are"))


def test_two_definitions_of_one_name_are_refused(root: Path) -> None:
    (root / "processors" / "again.py").write_text(PROCESSORS)
    with pytest.raises(SettingError, match=r"'clean' is declared in again\.py too"):
        find(root).processor("features")


def test_topics_of_each_dataset(root: Path) -> None:
    with (root / "pipeline.yaml").open("a") as file:
        file.write("datasets: [agent, coding]\n")
    names = [topic.name for topic in find(root).topics()]
    assert [name for name in names if name.startswith("features")] == ["features.agent", "features.coding"]


def test_a_topic_in_a_file_of_the_other_ending_is_read(root: Path) -> None:
    (root / "topics" / "other.yml").write_text("name: other\n")
    assert "other" in [topic.name for topic in find(root).topics()]


def test_a_topic_declared_twice_is_refused(root: Path) -> None:
    (root / "topics" / "other.yaml").write_text("name: features.agent\n")
    with pytest.raises(SettingError, match=r"features\.agent is declared in"):
        find(root).topics()


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("partitions: 1\n", 1, "no name"),
        ("name: a b\n", 1, "cannot be a topic"),
        ("name: a.{job}\n", 1, "cannot be a topic"),
        ("name: ..\n", 1, "cannot be a topic"),
        ("name: a\npartitions: 0\n", 2, "at least 1"),
        ("name: a\npartition: 2\n", 2, "did you mean partitions"),
        ("name: a\nvalue: avro\n", 2, "json, arrow, bytes"),
        ("name: a\ncleanup: none\n", 2, "delete, compact, compact,delete"),
        ("name: a\nretention: 7\n", 2, "or `forever`"),
        ("name: a\nretention: 0s\n", 2, "above 0"),
        ("name: a\nretention_size: 1gb\n", 2, "or `unbounded`"),
        ("name: a\nmax_message: 1MB2\n", 2, "64GiB"),
        ("name: a\nmax_message: 10\n", 2, "at least 262144"),
        ("name: a\nsegment: 1kB\n", 2, "at least"),
        ("- a\n", 1, "must be a mapping"),
    ],
)
def test_a_wrong_topic_is_refused_with_its_line(root: Path, text: str, line: int, says: str) -> None:
    path = root / "topics" / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(SettingError) as caught:
        find(root).topics()
    assert (caught.value.where["file"], caught.value.where["line"]) == (path, line)
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_workers_are_at_most_the_partitions(root: Path) -> None:
    project = find(root)
    assert check(project, LARGE) == [
        "stage prepare asks for 8 workers, its topics have 3 partitions: 3 workers are started"
    ]
    assert workers(project, project.pipeline().stage("prepare")) == 3


def replaced(root: Path, file: str, old: str, new: str) -> Project:
    path = root / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return find(root)


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("pipeline.yaml", "name: prepare", "name: prepair", "did you mean prepare"),
        ("pipeline.yaml", "parallelism: 8", "policy: sync", "policy means nothing"),
        ("pipeline.yaml", "checkpoint: every 5 steps", "parallelism: 2", "parallelism means nothing"),
        ("pipeline.yaml", "policy: sync", "ranks: 2", "ranks means nothing"),
        ("topics/raw.yaml", "name: raw", "name: rawer", "does not declare 'raw'"),
        ("topics/dlq.yaml", "name: dlq", "name: other", "does not declare 'dlq'"),
        ("topics/state.yaml", "partitions: 3", "partitions: 2", "as many"),
        ("topics/features.{dataset}.yaml", "partitions: 3", "partitions: 2", "at least 3"),
        ("topics/plan.fit.yaml", "partitions: 1", "partitions: 2", "1 partition"),
        ("topics/plan.fit.yaml", "partitions: 1", "partitions: 1\ncleanup: compact", "cleanup: delete"),
        ("topics/plan.fit.yaml", "partitions: 1", "partitions: 1\nretention: 5d", "kept longer"),
        ("trainers/fit.py", "tokenizer.json", "missing.json", "megaflow tokenizer train"),
        ("trainers/judge.py", 'trainer="fit"', 'trainer="fat"', "did you mean fit"),
        ("trainers/judge.py", "judge = ", "assert 0, ", "could not be loaded"),
        ("trainers/judge.py", "judge = Evaluation", "judge = dict", "exactly one"),
        ("processors/prepare.py", "Processor(", "dict(", "declares no Processor"),
    ],
)
def test_what_does_not_fit_together_is_refused(root: Path, file: str, old: str, new: str, says: str) -> None:
    project = replaced(root, file, old, new)
    with pytest.raises(SettingError) as caught:
        check(project, LARGE)
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_a_backlog_below_one_global_batch_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    init(root)
    path = root / "processors" / "data_preprocess.py"
    path.write_text(path.read_text().replace("high_bytes=64 << 20, low_bytes=16 << 20", "high_bytes=2, low_bytes=1"))
    with pytest.raises(SettingError, match="backlog of 1 to 2 bytes") as refused:
        check(find(root))
    assert "one fetch" in refused.value.hint


def test_a_definition_is_whole_for_every_thread_that_loads_it(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import threading\nthreading.Event().wait(0.3)\nname = 'whole'\n")
    with ThreadPoolExecutor(3) as pool:
        assert [d for ds in pool.map(lambda _: definitions(path, str), range(3)) for d in ds].count("whole") == 3


def test_a_sync_evaluation_gates_its_trainer(root: Path) -> None:
    assert find(root).gates("fit") == ("judge",)
    assert find(root).gates("another") == ()
    assert replaced(root, "pipeline.yaml", "policy: sync", "policy: async").gates("fit") == ()


def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    init(root)
    path = root / "trainers" / "model_finetune.py"
    path.write_text(path.read_text().replace("VOCABULARY = 4096", "VOCABULARY = 1000"))
    with pytest.raises(SettingError, match=r"has \d{4} tokens, .* vocabulary is 1000 \(file .*finetune.py\)") as no:
        check(find(root), LARGE)
    assert "give the model a vocabulary of" in no.value.hint
    job = Job(
        name="model_finetune",
        definition=path,
        root=root,
        bootstrap_servers="",
        security=Security(),
        s3=S3Address(endpoint_url=None),
    )
    with pytest.raises(SettingError, match="vocabulary is 1000"):
        job.trainer()
