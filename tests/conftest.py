"""What every test may ask for: a real Kafka, a real S3, real conversations, and the project's own samples.

The two services are the embedded ones, started when the first test of any worker asks, shared by all workers, and
stopped by the process that started the run. With MEGAFLOW_TEST_KAFKA=host:port and
MEGAFLOW_TEST_S3=http://KEY:SECRET@host:port in the environment running ones are used, and nothing is started.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import hypothesis
import pytest

if TYPE_CHECKING:
    from megaflow_stream.bus import Bus

# The same examples in every run: a new one found is a case of its own, not a surprise to somebody else.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

ROOT = Path(__file__).resolve().parent.parent
SHARED = "MEGAFLOW_TEST_SERVICES_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Address:
    """Where the tests' S3 is, and the keys that it accepts."""

    endpoint_url: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"


def pytest_configure(config: pytest.Config) -> None:
    """The first process makes the folder of the shared services; its workers inherit the name."""
    if not hasattr(config, "workerinput"):
        os.environ[SHARED] = tempfile.mkdtemp(prefix="megaflow-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    folder = Path(os.environ.pop(SHARED))
    if any(folder.iterdir()):
        from megaflow_stream.runtime.services import down

        asyncio.run(down(folder))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def kafka() -> str:
    """Bootstrap servers of a real broker that asks for no credentials."""
    if given := os.environ.get("MEGAFLOW_TEST_KAFKA"):
        return given
    from megaflow_stream.runtime.services import up

    options = {"kafka": True, "s3": False, "authenticate": False}
    return asyncio.run(up(Path(os.environ[SHARED]), **options)).bootstrap_servers


@pytest.fixture
async def bus(kafka: str) -> AsyncIterator[Bus]:
    """The test's own connection to the broker."""
    from megaflow_stream.bus import connect

    bus = await connect(kafka)
    yield bus
    await bus.close()


@pytest.fixture(scope="session")
def s3() -> S3Address:
    """A real S3 server: endpoint_url, access_key, secret_key, region."""
    if given := os.environ.get("MEGAFLOW_TEST_S3"):
        parts = urlsplit(given)
        return S3Address(
            endpoint_url=f"{parts.scheme}://{parts.hostname}:{parts.port}",
            access_key=parts.username or "",
            secret_key=parts.password or "",
        )
    from megaflow_stream.runtime.services import up

    found = asyncio.run(up(Path(os.environ[SHARED]), kafka=False, s3=True))
    return S3Address(endpoint_url=found.endpoint_url, access_key=found.access_key, secret_key=found.secret_key)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real conversations beside the clone; the test is skipped where it is not there."""
    folder = Path(os.environ.get("MEGAFLOW_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real conversations at {folder} (name another folder in MEGAFLOW_TEST_DATA)")
    return folder


@pytest.fixture(scope="session")
def samples() -> Path:
    """The folder of conversations of the project's own making, as `megaflow run` publishes them."""
    folder = ROOT / "topics" / "samples"
    if not folder.is_dir():
        pytest.skip(f"no samples at {folder}")
    return folder
