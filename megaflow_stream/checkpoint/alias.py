"""Aliases: names for checkpoints (`best`), moved by compare-and-set."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from megaflow_stream.checkpoint import names
from megaflow_stream.checkpoint.manifest import ManifestRef
from megaflow_stream.errors import Damaged, Fenced, NotFound
from megaflow_stream.storage.api import ObjectInfo, ObjectStore, Precondition


@dataclass(frozen=True, slots=True)
class Alias:
    """A name and the manifest that it stands for now. said: what whoever moved it gave as the reason."""

    name: str
    manifest: str
    sha256: str
    step: int
    etag: str
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ref(self) -> ManifestRef:
        return ManifestRef(self.manifest, self.sha256, self.step)


async def get(store: ObjectStore, job: str, name: str) -> Alias | None:
    """The alias as it is now; None where it has not been set. Raises `Damaged`."""
    key = names.alias(job, name)
    try:
        data, info = await store.get(key)
    except NotFound:
        return None
    return _parse(name, data, info)


async def every(store: ObjectStore, job: str) -> AsyncIterator[Alias]:
    """All aliases of a job."""
    async for listed in store.list(f"{names.prefix(job)}aliases/"):
        try:
            data, info = await store.get(listed.key)
        except NotFound:
            continue
        yield _parse(listed.key.rpartition("/")[2].removesuffix(".json"), data, info)


async def move(
    store: ObjectStore, job: str, name: str, to: ManifestRef, over: Alias | None, said: Mapping[str, Any]
) -> Alias:
    """Points the alias elsewhere. Raises `Fenced` where it is not `over` any more.

    `said` should be unique to the mover where two may move it alike: bytes that are the same count as one's own."""
    data = orjson.dumps({**to.to_json(), "said": dict(said)})
    try:
        if over is None:
            info = await store.put(names.alias(job, name), data, if_none_match=True)
        else:
            info = await store.put(names.alias(job, name), data, if_match=over.etag)
    except Precondition as error:
        raise Fenced(
            "the alias was moved by another evaluator",
            hint="look whether two evaluations of one trainer move the same alias",
            job=job,
            alias=name,
        ) from error
    return Alias(name, to.manifest, to.sha256, to.step, info.etag, dict(said))


def _parse(name: str, data: bytes, info: ObjectInfo) -> Alias:
    try:
        raw = orjson.loads(data)
        return Alias(name, raw["manifest"], raw["sha256"], int(raw["step"]), info.etag, raw.get("said", {}))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"the alias does not hold together: {error}", key=info.key) from error
