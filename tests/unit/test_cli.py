"""The command line's frame: what the help imports, what becomes of errors, exit codes, and the settings shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from megaflow_stream.cli import main as entry
from megaflow_stream.cli.context import Context, command_options, print_json, print_table
from megaflow_stream.errors import BadRecord, MegaflowError, ServiceUnreachable, SettingError, UsageError

FIXED = [
    "init",
    "run",
    "services",
    "topics",
    "publish",
    "process",
    "train",
    "evaluate",
    "status",
    "lag",
    "checkpoints",
    "lineage",
    "dlq",
    "config",
]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("MEGAFLOW_")]:
        monkeypatch.delenv(name)
    (tmp_path / "pipeline.yaml").write_text("pipeline:\n  - name: a\npublish:\n  producer: someone\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Makes `megaflow serve` raise."""

    @click.command()
    @click.option("--debug", is_flag=True)
    def fails(debug: bool) -> None:
        raise error

    monkeypatch.setattr("megaflow_stream.cli.later.serve", fails)


def test_the_help_lists_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from megaflow_stream.cli.main import run\n"
        "code = run(['--help'])\n"
        "heavy = {'torch', 'aiokafka', 'pyarrow', 'numpy', 'faust', 'aioboto3', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in FIXED:
        line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [name])
        assert len(line.split()) > 2


def test_config_show_imports_nothing_heavy(root: Path) -> None:
    program = (
        "import sys\n"
        "from megaflow_stream.cli.main import run\n"
        "assert run(['config', 'show']) == 0\n"
        "heavy = {'torch', 'aiokafka', 'pyarrow', 'numpy', 'faust', 'aioboto3'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (MegaflowError("it broke", hint="mend it", topic="t", partition=3), 1, "it broke (topic t, partition 3)"),
        (BadRecord("bad"), 1, "error: bad"),
        (SettingError("wrong", file="x.yaml", line=3), 2, "wrong (file x.yaml, line 3)"),
        (UsageError("misused"), 2, "error: misused"),
        (ServiceUnreachable("no broker"), 3, "error: no broker"),
        (click.UsageError("no such option"), 2, "no such option"),
        (click.ClickException("odd"), 1, "odd"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("a bug"), 1, "error: unexpected RuntimeError: a bug"),
        (ExceptionGroup("g", [RuntimeError("x"), ExceptionGroup("h", [ServiceUnreachable("gone")])]), 3, "error: gone"),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), 130, "interrupted"),
        (click.exceptions.Exit(1), 1, ""),
    ],
)
def test_the_exit_code_and_the_message_of_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, shown: str
) -> None:
    raising(monkeypatch, error)
    assert entry.run(["serve"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert shown in err
    assert "Traceback" not in err
    if isinstance(error, MegaflowError) and error.hint:
        assert "what to do: mend it" in err


@pytest.mark.parametrize("arguments", [["serve", "--debug"], ["--debug", "serve"]])
def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    raising(monkeypatch, RuntimeError("a bug"))
    assert entry.run(arguments) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "error: unexpected RuntimeError: a bug"  # the cause is the last line


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["publsh"]) == 2
    assert "did you mean publish" in capsys.readouterr().err
    assert entry.run(["--nonsense"]) == 2


@pytest.mark.parametrize("name", ["simulate", "inspect", "dropped", "dashboard", "serve"])
def test_a_command_of_a_later_version_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run([name, "some", "--thing", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"`megaflow {name}` is not in this version yet" in err
    assert "what to do:" in err
    assert entry.run([name, "--help"]) == 0


def test_replay_of_dead_letters_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megaflow_stream.cli.dlq")
    assert entry.run(["dlq", "replay", "--all"]) == 2
    assert "`megaflow dlq replay` is not in this version yet" in capsys.readouterr().err


def test_settings_are_shown_with_their_origin(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGAFLOW_S3__ENDPOINT_URL", "http://h:1")
    monkeypatch.setenv("MEGAFLOW_S3__SECRET_KEY", "hunter2")
    assert entry.run(["config", "show", "--json", "--bootstrap-servers", "h:9092"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    found = json.loads(out)
    assert found["publish.producer"]["value"] == "someone"
    assert found["publish.producer"]["origin"] == "pipeline.yaml:4"
    assert (found["kafka.bootstrap_servers"]["value"], found["kafka.bootstrap_servers"]["origin"]) == (
        "h:9092",
        "--bootstrap-servers",
    )
    assert (found["s3.secret_key"]["value"], found["s3.secret_key"]["origin"]) == ("***", "MEGAFLOW_S3__SECRET_KEY")
    assert entry.run(["config", "show"]) == 0
    assert any(
        line.split()[:3] == ["publish.producer", "someone", "pipeline.yaml:4"]
        for line in capsys.readouterr().out.splitlines()
    )


def test_what_the_stages_say_is_shown_and_what_the_machine_lacks(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "pipeline.yaml").write_text(
        "pipeline:\n  - name: a\n    resources: {cpu: 100000, memory: 1GiB}\n    checkpoint: every 2h\n"
        "  - name: b\n    depends_on: [a]\n    policy: sync\n"
    )
    assert entry.run(["config", "show", "--json"]) == 0
    out, err = capsys.readouterr()
    found = {name: (line["value"], line["origin"]) for name, line in json.loads(out).items() if "pipeline." in name}
    assert found == {
        "pipeline.a.resources.cpu": (100000.0, "pipeline.yaml:3"),
        "pipeline.a.resources.memory": ("1GiB", "pipeline.yaml:3"),
        "pipeline.a.checkpoint": ("every 2h", "pipeline.yaml:4"),
        "pipeline.b.depends_on": (["a"], "pipeline.yaml:6"),
        "pipeline.b.policy": ("sync", "pipeline.yaml:7"),
    }
    assert "warning: stage a asks for 100000 CPUs, this machine has" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["config", "show", "--bootstrap-servers", "nowhere"], "--bootstrap-servers"),
        (["config", "show", "--project", "/nowhere"], "no folder"),
        (["config", "show", "--project", "/"], "megaflow init"),
        (["config", "show", "--unknown"], "--unknown"),
        (["config"], "Usage"),
    ],
)
def test_wrong_use_exits_2(root: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_wrong_file_exits_2_with_its_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "pipeline.yaml").write_text("pipeline:\n  - name: a\nkafka:\n  bootstrap_server: h:1\n")
    assert entry.run(["config", "show"]) == 2
    err = capsys.readouterr().err
    assert f"file {root / 'pipeline.yaml'}, line 4" in err
    assert "did you mean bootstrap_servers" in err


@pytest.mark.parametrize(
    "arguments", [["services", "status"], ["publish", "x.jsonl", "--dry-run"], ["topics", "apply"], ["config", "show"]]
)
def test_a_wrong_stage_is_refused_by_every_command(
    root: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "pipeline.yaml").write_text("pipeline:\n  - name: a\n    paralelism: 1\n")
    assert entry.run(arguments) == 2
    err = capsys.readouterr().err
    assert f"file {root / 'pipeline.yaml'}, line 3" in err
    assert "did you mean parallelism" in err
    assert not (root / ".megaflow").exists()


def test_the_project_may_be_named_before_the_command(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/")
    assert entry.run(["--project", str(root), "config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["publish.producer"]["value"] == "someone"


def test_a_closed_stdout_is_quiet(root: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `megaflow config show | true`
    done = subprocess.run(
        [sys.executable, "-m", "megaflow_stream.cli.main", "config", "show"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""


def test_a_command_gets_its_context_and_may_return_its_code(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Context] = []

    @click.command()
    @click.argument("count", type=int)
    @command_options
    def own(context: Context, count: int) -> int:
        """Own."""
        seen.append(context)
        return count

    monkeypatch.setattr("megaflow_stream.cli.later.serve", own)
    assert entry.run(["serve", "7", "--json", "--s3-endpoint-url", "http://h:1"]) == 7
    (context,) = seen
    assert context.json
    assert context.project.root == root
    assert context.settings.s3.endpoint_url == "http://h:1"
    assert context.origins["s3.endpoint_url"] == "--s3-endpoint-url"


def test_json_is_one_line_and_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"path": Path("/a"), "bytes": b"x", "set": {2, 1}, 3: None})
    assert json.loads(capsys.readouterr().out) == {"path": "/a", "bytes": "x", "set": [1, 2], "3": None}
    print_table(("name", "n"), [("long name", 1), (None, 22)])
    assert capsys.readouterr().out == "name       n\nlong name  1\n           22\n"
    print_table(("name", "n"), [])
    assert capsys.readouterr().out == "name  n\n"
