"""The jars of Apache Kafka: named and hashed in `kafka.lock`, fetched by jgo, kept in a cache of the machine.

The lock has the coordinate and the SHA-256 of every jar, so a start resolves nothing: what is in the cache with its
hash is used, what is missing is downloaded to a private folder, hashed, and only then renamed into place. Two first
starts at once are safe: one downloads behind the cache's file lock, the other then finds the files.

A file in the cache that no longer has its hash is fetched again; a download with another hash is
refused and never reaches the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

from filelock import FileLock

from megaflow_stream.errors import Damaged, ServiceUnreachable
from megaflow_stream.runtime.services.background import submit

OTHER_SERVICES = (
    "with network access to a Maven repository run it once more (MEGAFLOW_MAVEN_URL names another one, "
    "MEGAFLOW_CACHE_DIR a folder with the jars of another machine); or name running services: --bootstrap-servers and "
    "--s3-endpoint-url (or MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS and MEGAFLOW_S3__ENDPOINT_URL)"
)
DOWNLOADS_AT_ONCE = 4
FETCH_TIMEOUT_SECONDS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Jar:
    """One locked jar. coordinate: GROUP:ARTIFACT:VERSION."""

    coordinate: str
    sha256: str

    @property
    def file(self) -> str:
        """Its name in the cache: with the group's name, so that one artifact of two groups is two files."""
        group, artifact, version = self.coordinate.split(":")
        return f"{group}.{artifact}-{version}.jar"


@cache
def locked() -> tuple[Jar, ...]:
    """Every jar of `kafka.lock`, the broker's own first."""
    text = files(__package__).joinpath("kafka.lock").read_text("utf-8")
    return tuple(Jar(coordinate=name, sha256=sha256) for name, sha256 in json.loads(text)["jars"].items())


def cache_dir() -> Path:
    """MEGAFLOW_CACHE_DIR, else `megaflow` in the user's cache folder (XDG base directory specification)."""
    if given := os.environ.get("MEGAFLOW_CACHE_DIR"):
        return Path(given).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "megaflow"


def class_path(
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    jars: Sequence[Jar] | None = None,
) -> list[Path]:
    """The checked files of every locked jar, downloading those that are missing.

    They come from the public Maven repository that jgo knows, or from the one that MEGAFLOW_MAVEN_URL names.

    Raises `ServiceUnreachable` naming the coordinate that could not be had, `Damaged` for a download with another
    hash than the locked one.
    """
    folder = (folder or cache_dir()) / "jars"
    jars = locked() if jars is None else jars
    if missing := _missing(jars, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if missing := _missing(jars, folder):
                say(f"fetching Apache Kafka ({len(missing)} jars) into {folder}, once on this machine")
                _fetch(missing, folder)
    return [folder / jar.file for jar in jars]


def _missing(jars: Sequence[Jar], folder: Path) -> list[Jar]:
    return [jar for jar in jars if not _is_good(folder / jar.file, jar.sha256)]


def _is_good(path: Path, sha256: str) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


def _fetch(jars: list[Jar], folder: Path) -> None:
    from jgo.maven import MavenContext, PythonResolver

    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as private:
        maven = MavenContext(
            resolver=PythonResolver(),
            repo_cache=Path(private),
            local_repos=[],
            remote_repos=_repositories(),
            timeout=FETCH_TIMEOUT_SECONDS,
        )

        def fetch(jar: Jar) -> None:
            group, artifact, version = jar.coordinate.split(":")
            try:
                path = maven.project(group, artifact).at_version(version).artifact().resolve()
            except (OSError, RuntimeError) as error:  # requests' errors are OSErrors
                raise ServiceUnreachable(
                    f"could not get {jar.coordinate}, a part of Apache Kafka: {_first_line(error)}",
                    hint=OTHER_SERVICES,
                ) from error
            if not _is_good(path, jar.sha256):
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                raise Damaged(
                    f"{jar.coordinate} was downloaded with SHA-256 {found}, but {jar.sha256} is locked: not used",
                    hint="the repository or something on the way to it changed the file; nothing was started",
                )
            os.replace(path, folder / jar.file)

        tasks = submit([partial(fetch, jar) for jar in jars], DOWNLOADS_AT_ONCE)
        try:
            for task in tasks:
                task.result()
        except Exception:
            for task in tasks:
                task.cancel()
            wait(tasks)  # those that have begun write into the private folder
            raise


def _repositories() -> dict[str, str] | None:
    """None means jgo's own. Whatever the repository, a file counts by its hash alone."""
    url = os.environ.get("MEGAFLOW_MAVEN_URL", "").rstrip("/")
    return {"given": url} if url else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
