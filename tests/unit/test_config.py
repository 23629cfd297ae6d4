"""Settings: which source wins, where each value came from, and that what is wrong is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_stream.config.load import flag_environment, load
from megaflow_stream.config.settings import settings
from megaflow_stream.config.shown import shown
from megaflow_stream.config.yaml import parse_yaml
from megaflow_stream.errors import NotFound, SettingError


def project(tmp_path: Path, text: str) -> Path:
    (tmp_path / "pipeline.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    root = project(
        tmp_path,
        "publish:\n  producer: file\n  dataset: file\ns3:\n  bucket: from-file\n  endpoint_url: http://file:1\n",
    )
    environment = {
        "MEGAFLOW_PUBLISH__DATASET": "environment",
        "MEGAFLOW_S3__ENDPOINT_URL": "http://environment:1",
        "MEGAFLOW_LOG_LEVEL": "debug",
    }
    loaded = load(root, {"s3.endpoint_url": "http://flag:1", "kafka.bootstrap_servers": None}, environment=environment)
    assert loaded.settings.kafka.bootstrap_servers is None
    assert loaded.settings.publish.producer == "file"
    assert loaded.settings.publish.dataset == "environment"
    assert loaded.settings.s3.endpoint_url == "http://flag:1"
    assert {name: origin for name, origin in loaded.origins.items() if origin != "default"} == {
        "publish.producer": "pipeline.yaml:2",
        "publish.dataset": "MEGAFLOW_PUBLISH__DATASET",
        "s3.bucket": "pipeline.yaml:5",
        "s3.endpoint_url": "--s3-endpoint-url",
        "log_level": "MEGAFLOW_LOG_LEVEL",
    }


def test_every_setting_has_an_origin_and_says_what_it_is_for() -> None:
    loaded = load(None, environment={})
    known = list(settings())
    assert {setting.name for setting in known} == set(loaded.origins)
    assert all(setting.doc for setting in known)
    assert [setting.name for setting in known if setting.secret] == ["kafka.password", "s3.secret_key"]


def test_units_and_types_of_every_source(tmp_path: Path) -> None:
    root = project(
        tmp_path, "services: {kafka_memory: 1GiB, start: 90s}\ndatasets: [a, b]\npublish: {samples: no}\nrun:\n"
    )
    loaded = load(root, environment={"MEGAFLOW_RUN__TRAINER_RANKS": "3", "MEGAFLOW_KAFKA__REPLICATION_FACTOR": "2"})
    assert loaded.settings.services.kafka_memory_bytes == 1 << 30
    assert loaded.settings.services.start_seconds == 90
    assert loaded.settings.datasets == ("a", "b")
    assert loaded.settings.publish.samples is False
    assert loaded.settings.run.trainer_ranks == 3
    assert loaded.settings.kafka.replication_factor == 2


def test_an_empty_variable_unsets_what_may_be_unset(tmp_path: Path) -> None:
    root = project(tmp_path, "kafka: {bootstrap_servers: 'a:1'}\n")
    loaded = load(root, environment={"MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS": ""})
    assert loaded.settings.kafka.bootstrap_servers is None


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("pipelin: []\n", 1, "did you mean pipeline"),
        ("pipeline: []\nkafka:\n  bootstrap_server: a:1\n", 3, "did you mean bootstrap_servers"),
        ("kafka:\n  memory: 2\n", 2, "known are: bootstrap_servers"),
        ("kafka: here\n", 1, "must be a mapping"),
        ("kafka:\n\n  bootstrap_servers: localhost\n", 3, "HOST:PORT"),
        ("kafka:\n  bootstrap_servers: 'h:99999'\n", 2, "HOST:PORT"),
        ("kafka:\n  bootstrap_servers: 9092\n", 2, "in quotes"),
        ("kafka:\n  bootstrap_servers: [a:1, b:1]\n", 2, "must be text"),
        ("kafka:\n  security_protocol: ssl\n", 2, "PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        ("kafka:\n  replication_factor: yes\n", 2, "must be a whole number"),
        ("kafka:\n  replication_factor: 0\n", 2, "must be above 0"),
        ("kafka:\n  replication_factor: 1.5\n", 2, "must be a whole number"),
        ("kafka:\n  replication_factor: 010\n", 2, "010 is 8 to YAML"),
        ("run:\n  trainer_ranks: 1:30\n", 2, "1:30 is 90 to YAML"),
        ("pipeline:\n  - name: a\n    resources: {cpu: 1:30.5}\n", 3, "1:30.5 is 90.5 to YAML"),
        ("kafka:\n  replication_factor:\n", 2, "not nothing"),
        ("s3:\n  endpoint_url: minio:9000\n", 2, "http://HOST"),
        ("s3:\n  endpoint_url: http://user:pw@host\n", 2, "without credentials"),
        ("s3:\n  bucket: My_Bucket\n", 2, "a bucket's name"),
        ("services:\n  kafka_memory: 2gi\n", 2, "did you mean Gi"),
        ("services:\n  kafka_memory: 1MiB\n", 2, "at least 256MiB"),
        ("services:\n  start: 30\n", 2, "500ms, 30s, 15m, 2h, 1d"),
        ("publish:\n  dataset: a/b\n", 2, "a dataset's name"),
        ("publish:\n  dataset: x.validation\n", 2, "validation split"),
        ("publish:\n  samples: 1\n", 2, "true or false"),
        ("datasets:\n  - no\n", 1, "in quotes"),
        ("datasets: agent\n", 1, "a list of names"),
        ("log_level: loud\n", 1, "debug, info, warning, error"),
        ("s3:\n  region: a\n  bucket: abc\n  region: b\n", 4, "given twice, first on line 2"),
        ("s3: {\n", 2, "not YAML"),
        ("s3:\n\tregion: a\n", 2, "not YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not YAML"),
        ("- 1\n", 1, "must hold a mapping"),
        ("? [a]\n: b\n", 1, "must be plain text"),
        ("s3: {region: !!python/object:x y}\n", 1, "not YAML"),
        ("s3: {region: 2026-99-99}\n", 1, "is not a value"),
        ("s3: &s\n  region: *s\n", 2, "nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        load(project(tmp_path, text), environment={})
    error = caught.value
    assert error.exit_code == 2
    assert error.where["file"] == tmp_path / "pipeline.yaml"
    assert error.where["line"] == line
    assert says in f"{error.message} {error.hint}"


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("MEGAFLOW_KAFKA__BOOTSTRAP_SERVER", "a:1", "did you mean MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS"),
        ("MEGAFLOW_KAFKA_BOOTSTRAP_SERVERS", "a:1", "did you mean MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS"),
        ("MEGAFLOW_SERVICES__KAFKA_MEMORY_BYTES", "1GiB", "did you mean MEGAFLOW_SERVICES__KAFKA_MEMORY"),
        ("MEGAFLOW_RUN__TRAINER_RANKS", "two", "whole number"),
        ("MEGAFLOW_SERVICES__KAFKA_MEMORY", "2gi", "64GiB"),
        ("MEGAFLOW_PUBLISH__SAMPLES", "maybe", "true, yes, on, 1"),
        ("MEGAFLOW_LOG_LEVEL", "", "must be one of"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variable: str, value: str, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        load(None, environment={variable: value})
    assert variable in str(caught.value)
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_a_variable_that_is_no_setting_of_ours_is_left_alone() -> None:
    load(None, environment={"MEGAFLOW_TEST_KAFKA": "x", "OTHER__NAME": "y"})


def test_a_wrong_flag_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match="--s3-endpoint-url"):
        load(None, {"s3.endpoint_url": "nowhere"}, environment={})


def test_a_login_without_credentials_is_refused() -> None:
    with pytest.raises(SettingError, match=r"needs kafka\.username and kafka\.password"):
        load(None, environment={"MEGAFLOW_KAFKA__SECURITY_PROTOCOL": "SASL_SSL"})


@pytest.mark.parametrize(
    ("text", "line", "said", "address"),
    [
        (
            "kafka:\n  ca_file: x.pem\n  security_protocol: SSL\n",
            3,
            "kafka.security_protocol and kafka.ca_file",
            "KAFKA",
        ),
        ("kafka:\n  bootstrap_servers:\n  sasl_mechanism: SCRAM-SHA-256\n", 3, "kafka.sasl_mechanism is", "KAFKA"),
        ("kafka:\n  username: me\n", 2, "kafka.username is", "KAFKA"),
        ("s3:\n  bucket: mine\n  region: eu-west-1\n  access_key: a\n", 4, "s3.access_key and s3.region", "S3"),
    ],
)
def test_what_only_an_existing_service_heeds_is_refused_without_its_address(
    tmp_path: Path, text: str, line: int, said: str, address: str
) -> None:
    """The embedded one would be used, with other data than was meant, and nobody would notice."""
    root = project(tmp_path, text)
    with pytest.raises(SettingError) as caught:
        load(root, environment={})
    error = caught.value
    assert (error.exit_code, error.where) == (2, {"file": root / "pipeline.yaml", "line": line})
    assert said in error.message
    assert f"MEGAFLOW_{address}__" in error.hint
    given = {"MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS": "h:1", "MEGAFLOW_S3__ENDPOINT_URL": "https://s3.amazonaws.com"}
    load(root, environment=given)
    load(root, {"kafka.bootstrap_servers": "h:1", "s3.endpoint_url": "https://s3.amazonaws.com"}, environment={})


def test_a_secret_in_the_environment_without_an_address_is_refused_by_name_alone() -> None:
    with pytest.raises(SettingError, match="MEGAFLOW_S3__SECRET_KEY") as caught:
        load(None, environment={"MEGAFLOW_S3__SECRET_KEY": "hunter2"})
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"
    assert "https://s3.REGION.amazonaws.com" in caught.value.hint


def test_defaults_spelled_out_and_an_address_without_credentials_are_fine() -> None:
    """An S3 without keys takes those of boto's own chain."""
    load(None, environment={"MEGAFLOW_KAFKA__SECURITY_PROTOCOL": "PLAINTEXT", "MEGAFLOW_KAFKA__PASSWORD": ""})
    load(None, environment={"MEGAFLOW_S3__ENDPOINT_URL": "https://s3.amazonaws.com", "AWS_ACCESS_KEY_ID": "a"})


def test_a_wrong_secret_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        load(project(tmp_path, "s3:\n  secret_key: 8675309\n"), environment={})
    assert "8675309" not in str(caught.value)


def test_secrets_are_masked_and_units_are_spelled_out() -> None:
    environment = {"MEGAFLOW_KAFKA__PASSWORD": "hunter2", "MEGAFLOW_S3__ACCESS_KEY": "visible"}
    addresses = {"kafka.bootstrap_servers": "h:1", "s3.endpoint_url": "http://h:1"}
    loaded = load(None, addresses, environment=environment)
    lines = {line.name: line for line in shown(loaded.settings, loaded.origins)}
    assert lines["kafka.password"].value == lines["kafka.password"].text == "***"
    assert lines["kafka.password"].origin == "MEGAFLOW_KAFKA__PASSWORD"
    assert lines["s3.secret_key"].text == "-"  # not set is not a secret
    assert lines["s3.access_key"].text == "visible"
    assert lines["services.kafka_memory"].text == "512MiB"
    assert lines["run.trainer_ranks"].value is None
    assert not any("hunter2" in str(line) for line in lines.values())


def test_flags_reach_a_child_by_its_environment() -> None:
    loaded = load(None, {"kafka.bootstrap_servers": "h:1"}, environment={"MEGAFLOW_LOG_LEVEL": "debug"})
    assert flag_environment(loaded) == {"MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS": "h:1"}


def test_a_missing_file_is_said() -> None:
    with pytest.raises(NotFound):
        load(Path("/nowhere"), environment={})


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(SettingError, match="cannot be read"):
        load(tmp_path, environment={})


def test_a_document_that_holds_itself_ends(tmp_path: Path) -> None:
    with pytest.raises(SettingError):
        parse_yaml("a: &a [*a]\n", tmp_path / "x.yaml")


def test_lines_are_those_of_keys(tmp_path: Path) -> None:
    found = parse_yaml("# comment\na:\n  - x\n\n  - y\nb: >\n  long\n", tmp_path / "x.yaml").value
    assert [found["a"].line, found["a"].value[1].line, found["b"].line] == [2, 5, 6]
    assert parse_yaml("# nothing\n", tmp_path / "x.yaml").value == {}
