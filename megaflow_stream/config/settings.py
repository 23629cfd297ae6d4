"""The settings there are: their defaults, their types, what each is for. How they are read is `config.load`.

A setting's name is its section and field, `kafka.bootstrap_servers`; a field that carries a unit is written without
it in `pipeline.yaml` and the environment, since the value says the unit: `services.kafka_memory: 512MiB` becomes
`services.kafka_memory_bytes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from megaflow_stream.config.values import Kind

_SERVER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# What Kafka takes in a topic's name, without a leading dot, and short enough for `features.DATASET.validation`.
_DATASET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of one setting. `name` is dotted; `path` leads to its value in `Settings`."""

    name: str
    path: tuple[str, ...]
    kind: Kind
    default: Any
    optional: bool
    secret: bool
    choices: tuple[str, ...]
    check: Callable[[Any], None] | None
    flag: str
    doc: str

    @property
    def variable(self) -> str:
        return "MEGAFLOW_" + self.name.upper().replace(".", "__")


def _setting(
    default: Any,
    doc: str,
    kind: Kind = "text",
    *,
    optional: bool = False,
    secret: bool = False,
    choices: tuple[str, ...] = (),
    check: Callable[[Any], None] | None = None,
    flag: str = "",
) -> Any:
    metadata = {
        "kind": kind,
        "doc": doc,
        "optional": optional or default is None,
        "secret": secret,
        "choices": choices,
        "check": check,
        "flag": flag,
    }
    return field(default=default, metadata=metadata)


def _servers(value: str) -> None:
    for server in value.split(","):
        match = _SERVER.fullmatch(server.strip())
        if match is None or not 0 < int(match[2]) < 65536:
            raise ValueError(f"must be HOST:PORT, or several with commas between, not {server.strip()!r}")


def _url(value: str) -> None:
    if not re.fullmatch(r"https?://[^/\s@]+/?", value):
        raise ValueError("must be http://HOST[:PORT] or https://HOST[:PORT], without credentials or a path")


def _bucket(value: str) -> None:
    if not _BUCKET.fullmatch(value):
        raise ValueError(f"must be 3 to 63 of a-z, 0-9, '.', '-', a bucket's name, not {value!r}")


def check_dataset(value: str) -> None:
    """Raises `ValueError` where the name cannot be part of a topic's name, or is another dataset's validation split."""
    if not _DATASET.fullmatch(value):
        raise ValueError(f"must be letters, digits, '.', '_', '-', a dataset's name, not {value!r}")
    if value.endswith(".validation"):
        raise ValueError(f"{value!r} would be the validation split of another dataset: choose another name")


def _datasets(values: tuple[str, ...]) -> None:
    for value in values:
        check_dataset(value)


def _positive(value: float) -> None:
    if value <= 0:
        raise ValueError(f"must be above 0, not {value}")


def _heap(value: int) -> None:
    # A KRaft broker below 256 MiB spends its time collecting garbage, or does not start.
    if value < 256 << 20:
        raise ValueError("must be at least 256MiB")


@dataclass(frozen=True, kw_only=True)
class KafkaSettings:
    """Which Kafka is used, and how it is talked to."""

    bootstrap_servers: str | None = _setting(
        None, "HOST:PORT[,HOST:PORT...] of an existing Kafka; none starts the embedded one", check=_servers
    )
    security_protocol: str = _setting(
        "PLAINTEXT", "how to connect", choices=("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
    )
    sasl_mechanism: str = _setting(
        "PLAIN", "how to log in, with a SASL_ protocol", choices=("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
    )
    username: str = _setting("", "user, with a SASL_ protocol")
    password: str = _setting("", "password, with a SASL_ protocol", secret=True)
    ca_file: str = _setting("", "certificates to trust with an SSL protocol; none takes the system's")
    replication_factor: int = _setting(1, "copies of each partition of new topics", "integer", check=_positive)


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """Where checkpoints are stored."""

    endpoint_url: str | None = _setting(
        None, "URL of an existing S3; none starts the embedded one", check=_url, flag="--s3-endpoint-url"
    )
    bucket: str = _setting("megaflow", "bucket, made where it is missing", check=_bucket)
    access_key: str = _setting("", "access key of an existing S3")
    secret_key: str = _setting("", "secret key of an existing S3", secret=True)
    region: str = _setting("us-east-1", "region of an existing S3")


@dataclass(frozen=True, kw_only=True)
class ServicesSettings:
    """The embedded services."""

    kafka_memory_bytes: int = _setting(512 << 20, "heap of the embedded broker", "bytes", check=_heap)
    start_seconds: float = _setting(120.0, "how long an embedded service may take to start", "seconds", check=_positive)


@dataclass(frozen=True, kw_only=True)
class PublishSettings:
    """What is published, and as whose."""

    dataset: str = _setting(
        "agent",
        "dataset that conversations are published to; what a document itself calls its `dataset` is metadata",
        check=check_dataset,
    )
    producer: str = _setting("megaflow", "name under which `megaflow publish` and `run` publish")
    samples: bool = _setting(True, "`megaflow run` publishes the project's sample conversations", "flag")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """`megaflow run`."""

    trainer_ranks: int | None = _setting(
        None, "ranks of each trainer, in place of the stage's `ranks`", "integer", check=_positive
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting of a project."""

    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    s3: S3Settings = field(default_factory=S3Settings)
    services: ServicesSettings = field(default_factory=ServicesSettings)
    publish: PublishSettings = field(default_factory=PublishSettings)
    run: RunSettings = field(default_factory=RunSettings)
    datasets: tuple[str, ...] = _setting((), "datasets beside `publish.dataset`", "texts", check=_datasets)
    log_level: str = _setting(
        "info", "least level of the messages on stderr", choices=("debug", "info", "warning", "error")
    )

    def value(self, setting: Setting) -> Any:
        """The value of one setting."""
        found: Any = self
        for part in setting.path:
            found = getattr(found, part)
        return found


SECTIONS: dict[str, type[Any]] = {
    "kafka": KafkaSettings,
    "s3": S3Settings,
    "services": ServicesSettings,
    "publish": PublishSettings,
    "run": RunSettings,
}


def settings() -> Iterator[Setting]:
    """Every setting there is, in the order in which they are shown."""
    for section, kind in SECTIONS.items():
        yield from _of(kind, (section,))
    yield from _of(Settings, ())


def _of(kind: type[Any], section: tuple[str, ...]) -> Iterator[Setting]:
    for item in fields(kind):
        data = dict(item.metadata)
        if not data:
            continue
        path = (*section, item.name)
        unit = {"bytes": "_bytes", "seconds": "_seconds"}.get(data["kind"], "")
        name = ".".join(path).removesuffix(unit)
        data["flag"] = data["flag"] or "--" + name.rsplit(".", 1)[-1].replace("_", "-")
        yield Setting(name=name, path=path, default=item.default, **data)
