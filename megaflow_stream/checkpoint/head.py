"""The head: the one object of a job that moves, by compare-and-set; it names the manifest that is the truth.

A new writer takes the head over before it reads it; from then on no older one can move it.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from megaflow_stream.checkpoint import names
from megaflow_stream.checkpoint.manifest import ManifestRef
from megaflow_stream.errors import Damaged, Fenced, NotFound
from megaflow_stream.storage.api import ObjectStore, Precondition


@dataclass(frozen=True, slots=True)
class Head:
    """What a next checkpoint builds on: a manifest, and the etag that `head.json` had then.

    After a fallback `manifest` is older than what head.json names; the etag is head.json's all the same.
    """

    manifest: str
    sha256: str
    etag: str
    step: int

    @property
    def ref(self) -> ManifestRef:
        return ManifestRef(self.manifest, self.sha256, self.step)


async def head(store: ObjectStore, job: str) -> Head | None:
    """The head as it is now; None for a job without a checkpoint. Raises `Damaged`."""
    key = names.head(job)
    try:
        data, info = await store.get(key)
    except NotFound:
        return None
    try:
        raw = orjson.loads(data)
        return Head(raw["manifest"], raw["manifest_sha256"], info.etag, int(raw["step"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"the head does not hold together: {error}", key=key) from error


async def take_over(store: ObjectStore, job: str, writer: str) -> None:
    """Writes the head anew as it is, under the name of a new writer: a move by an older one that is on its way, or
    that is tried again, finds another etag and fails. Where there is no head yet it can do nothing."""
    key = names.head(job)
    while True:
        try:
            data, info = await store.get(key)
        except NotFound:
            return
        try:
            raw = {**orjson.loads(data), "writer": writer}
        except (orjson.JSONDecodeError, TypeError) as error:
            raise Damaged(f"the head does not hold together: {error}", key=key) from error
        try:
            await store.put(key, orjson.dumps(raw), if_match=info.etag)
            return
        except Precondition:
            continue  # the older one was faster: its head is taken over then


async def moved(store: ObjectStore, job: str, writer: str, step: int) -> Head | None:
    """The head, where one of this writer's tries for `step` has moved it: the answer to that was lost."""
    data, info = await store.get(names.head(job))
    try:
        raw = orjson.loads(data)
        if str(raw["writer"]).startswith(f"{writer}-") and int(raw["step"]) == step:
            return Head(raw["manifest"], raw["manifest_sha256"], info.etag, step)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        pass  # another's
    return None


async def move(store: ObjectStore, job: str, to: ManifestRef, over: Head | None, *, writer: str, at_ms: int) -> Head:
    """Moves the head over the one that the caller built on. Raises `Fenced` where it is another by now.

    `writer` is random for each writer: two that write the very same checkpoint are still told apart.
    """
    data = orjson.dumps(
        {
            "job": job,
            "step": to.step,
            "manifest": to.manifest,
            "manifest_sha256": to.sha256,
            "writer": writer,
            "at_ms": at_ms,
        }
    )
    try:
        if over is None:
            info = await store.put(names.head(job), data, if_none_match=True)
        else:
            info = await store.put(names.head(job), data, if_match=over.etag)
    except Precondition as error:
        raise Fenced(
            "the job's head was moved by another trainer",
            hint="another trainer of this job is running: stop this one, or start it again to follow the other's head",
            job=job,
            step=to.step,
        ) from error
    return Head(to.manifest, to.sha256, info.etag, to.step)
