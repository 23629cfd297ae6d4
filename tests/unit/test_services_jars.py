"""The jars of Kafka: locked by hash, fetched once, refused when they are not what was locked."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megaflow_stream.errors import Damaged, ServiceUnreachable
from megaflow_stream.runtime.services import jars
from megaflow_stream.runtime.services.jars import Jar

CONTENT = {f"/org/example/part{i}/1.{i}/part{i}-1.{i}.jar": f"content of part {i}".encode() * 100 for i in range(5)}


def _jar(path: str, content: bytes) -> Jar:
    _, group, company, artifact, version, _ = path.split("/")
    return Jar(coordinate=f"{group}.{company}:{artifact}:{version}", sha256=hashlib.sha256(content).hexdigest())


JARS = [_jar(path, content) for path, content in CONTENT.items()]


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """A Maven repository on this machine with five small files; counts what it was asked for."""
    asked: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            content = CONTENT.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("MEGAFLOW_MAVEN_URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_lock_names_the_broker_and_a_hash_for_every_jar() -> None:
    found = jars.locked()
    assert found[0].coordinate == "org.apache.kafka:kafka_2.13:4.3.1"
    assert len(found) == len({jar.file for jar in found}) > 40
    assert all(len(jar.sha256) == 64 and len(jar.coordinate.split(":")) == 3 for jar in found)
    # Without a backend of SLF4J the broker is silent, and an error message could not show its last lines.
    assert any(jar.coordinate.startswith("org.slf4j:slf4j-simple:") for jar in found)


def test_two_first_starts_at_once_download_each_jar_once(repository: Counter[str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(jars.class_path, tmp_path, jars=JARS) for _ in range(2))
    assert first.result() == second.result()
    assert [path.read_bytes() for path in first.result()] == list(CONTENT.values())
    assert {path: repository[path] for path in CONTENT} == dict.fromkeys(CONTENT, 1)
    left = {path.name for path in (tmp_path / "jars").iterdir()} - {jar.file for jar in JARS}
    assert left == {".lock"}


def test_a_file_that_was_changed_in_the_cache_is_fetched_again(repository: Counter[str], tmp_path: Path) -> None:
    path = jars.class_path(tmp_path, jars=JARS)[3]
    path.write_bytes(b"something else")
    repository.clear()
    jars.class_path(tmp_path, jars=JARS)
    assert path.read_bytes() == list(CONTENT.values())[3]
    assert [asked for asked in repository if asked.endswith(".jar")] == [list(CONTENT)[3]]


def test_a_download_with_another_hash_is_refused(repository: Counter[str], tmp_path: Path) -> None:
    wrong = Jar(coordinate=JARS[2].coordinate, sha256="0" * 64)
    with pytest.raises(Damaged, match=r"org\.example:part2:1\.2 was downloaded with SHA-256 [0-9a-f]{64}") as caught:
        jars.class_path(tmp_path, jars=[*JARS[:2], wrong, *JARS[3:]])
    assert JARS[2].sha256 in str(caught.value)
    assert not (tmp_path / "jars" / wrong.file).exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # jgo leaves the refused answer to the garbage collector
def test_a_jar_that_the_repository_does_not_have_is_named(repository: Counter[str], tmp_path: Path) -> None:
    with pytest.raises(ServiceUnreachable, match=r"could not get org\.example:missing:9"):
        jars.class_path(tmp_path, jars=[Jar(coordinate="org.example:missing:9", sha256="0" * 64)])
    gc.collect()


def test_without_network_the_error_names_the_coordinate_and_the_way_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody listens there
    for name in ("NO_PROXY", "no_proxy", "MEGAFLOW_MAVEN_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ServiceUnreachable) as caught:
        jars.class_path(tmp_path)
    assert "could not get org." in str(caught.value)
    assert caught.value.exit_code == 3
    for way in ("--bootstrap-servers", "--s3-endpoint-url", "MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS", "MEGAFLOW_S3__"):
        assert way in caught.value.hint


def test_with_a_full_cache_nothing_is_resolved(
    repository: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars.class_path(tmp_path, jars=JARS)
    repository.clear()
    code = (
        "import sys; from pathlib import Path; from megaflow_stream.runtime.services import jars\n"
        f"jars.class_path(Path({str(tmp_path)!r}), jars=[jars.Jar(coordinate=c, sha256=s) for c, s in "
        f"{[(jar.coordinate, jar.sha256) for jar in JARS]!r}])\n"
        "sys.exit('jgo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert not repository


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGAFLOW_CACHE_DIR", str(tmp_path / "mine"))
    assert jars.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("MEGAFLOW_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jars.cache_dir() == tmp_path / "megaflow"
