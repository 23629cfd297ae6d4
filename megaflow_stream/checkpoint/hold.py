"""Holds: a checkpoint that is being evaluated is not pruned, and one that is being pruned is not evaluated.

    who holds                                   who prunes
    1. moves the hold, an alias, to it          1. writes a mark: the manifests that are about to go
    2. looks for a mark that names it           2. reads the aliases: what one names stays
    3. looks whether the manifest is there      3. deletes the others, then the mark

Both write before they read, so at least one sees the other. A prune that did not see the hold had written its mark
before the hold was moved: whoever holds finds the mark, or, where that is gone again, that the manifest is. (Objects
are read as they were last written: S3 promises it, lists included.)
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

import orjson

from megaflow_stream.checkpoint import alias, names
from megaflow_stream.checkpoint.manifest import ManifestRef
from megaflow_stream.errors import Fenced, NotFound
from megaflow_stream.storage.api import ObjectStore

MARK_SECONDS = 86400.0  # no prune takes a day: an older mark is of one that was killed


class Hold:
    """One evaluation's hold. `open` before the first `take`.

    name: of its alias.
    """

    def __init__(self, store: ObjectStore, job: str, name: str) -> None:
        self.store, self.job, self.name = store, job, name
        self._at: alias.Alias | None = None

    async def open(self) -> None:
        """Takes the hold over where it stands: an older evaluator can move it no more."""
        while (found := await alias.get(self.store, self.job, self.name)) is not None:
            try:
                self._at = await self._move(found.ref, found)
                return
            except Fenced:
                continue  # the older one was faster: from there then
        self._at = None

    async def take(self, ref: ManifestRef) -> bool:
        """Whether the checkpoint is there, and stays until the hold is moved again.

        Raises `Fenced` where a newer evaluator has the hold."""
        try:
            self._at = await self._move(ref, self._at)
        except Fenced:
            if self._at is not None:
                raise
            await self.open()  # the very first was an older one's
            self._at = await self._move(ref, self._at)
        async for info in self.store.list(names.pruning(self.job)):
            try:
                data, _ = await self.store.get(info.key)
            except NotFound:
                continue  # that prune has ended
            if ref.manifest in orjson.loads(data):
                return False
        return await self.store.head(ref.manifest) is not None

    async def _move(self, ref: ManifestRef, over: alias.Alias | None) -> alias.Alias:
        return await alias.move(self.store, self.job, self.name, ref, over, {"nonce": secrets.token_hex(8)})


async def mark(store: ObjectStore, job: str, going: Collection[str]) -> str:
    """Says that these manifests are about to be deleted; returns the mark's key."""
    key = f"{names.pruning(job)}{secrets.token_hex(8)}.json"
    await store.put(key, orjson.dumps(sorted(going)))
    return key


async def sweep(store: ObjectStore, job: str, now: float) -> None:
    """Deletes the marks of prunes that were killed long ago. now: wall seconds."""
    async for info in store.list(names.pruning(job)):
        if now - info.modified > MARK_SECONDS:
            await store.delete(info.key)
