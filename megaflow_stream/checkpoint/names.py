"""Where the objects of a job lie in the bucket."""

from __future__ import annotations

import re

from megaflow_stream.errors import SettingError

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MANIFEST = re.compile(r"jobs/(?P<job>[^/]+)/manifests/(?P<step>\d{12})-(?P<hash>[0-9a-f]{8})\.json")


def prefix(job: str) -> str:
    if not _JOB.fullmatch(job):
        raise SettingError("a name of a job or alias is letters, digits, `.`, `_` and `-`", name=job)
    return f"jobs/{job}/"


def chunk(job: str, sha256: str) -> str:
    return f"{prefix(job)}chunks/{sha256}"


def lineage(job: str, sha256: str) -> str:
    return f"{prefix(job)}lineage/{sha256}.parquet"


def manifest(job: str, step: int, sha256: str) -> str:
    return f"{prefix(job)}manifests/{step:012d}-{sha256[:8]}.json"


def head(job: str) -> str:
    return f"{prefix(job)}head.json"


def saving(job: str) -> str:
    """There while a checkpoint of the job is being written."""
    return f"{prefix(job)}saving.json"


def pruning(job: str) -> str:
    """Prefix of the marks of prunes that are under way."""
    return f"{prefix(job)}pruning/"


def alias(job: str, name: str) -> str:
    prefix(name)
    return f"{prefix(job)}aliases/{name}.json"


def parse_manifest(key: str) -> tuple[int, str] | None:
    """(step, first 8 hex digits of the hash) of a manifest's key, None for any other key."""
    found = _MANIFEST.fullmatch(key)
    return (int(found["step"]), found["hash"]) if found else None
