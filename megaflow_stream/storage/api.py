"""What MegaFlow asks of an object store: S3 is the one that users meet (`storage.s3`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from megaflow_stream.errors import MegaflowError


class Precondition(MegaflowError):
    """If-None-Match or If-Match did not hold: somebody else wrote first."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as listed or written."""

    key: str
    size_bytes: int
    etag: str
    modified: float = 0.0


class ObjectStore(Protocol):
    """One bucket. Keys are relative to it. Errors: `NotFound`, `Precondition`, `ServiceUnreachable` (retriable)."""

    async def put(
        self, key: str, data: bytes | memoryview, *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        """Writes an object whole. `if_none_match`: only where none is; `if_match`: only over that etag.

        After an answer that was lost, a conditional write is checked by reading: an object with the very same bytes
        counts as written."""
        ...

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]: ...

    async def get_range(self, key: str, start: int, length: int) -> bytes: ...

    async def head(self, key: str) -> ObjectInfo | None: ...

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]: ...

    async def delete(self, key: str) -> None: ...

    async def close(self) -> None: ...
