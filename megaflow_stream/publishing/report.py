"""What a publish did, and what it refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

from megaflow_stream.conversations.files import Source
from megaflow_stream.errors import UsageError

SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A record that was not published. `line` is the row for Parquet."""

    file: str
    line: int
    reason: str
    raw: bytes = b""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        raw = self.raw.decode("utf-8", "backslashreplace")
        return {"file": self.file, "line": self.line, "reason": self.reason, "raw": raw}


@dataclass(slots=True, kw_only=True)
class Report:
    """Counts of one publish; `progress` sees it grow.

    published, bytes: documents that went out in committed transactions, and the bytes of their values.
    already_published: documents that an earlier run had published.
    same_id_other_content: documents of this run whose own id an earlier one of it had with other bytes; all are kept.
        What other runs have published is not compared.
    rejected, first_rejects: bad records, and the first of them.
    passed: what was left alone in folders, and why.
    read_bytes, total_bytes: of the files, as they lie on disk; total is 0 where it is not known.
    """

    published: int = 0
    already_published: int = 0
    rejected: int = 0
    same_id_other_content: int = 0
    bytes: int = 0
    seconds: float = 0.0
    files: int = 0
    by_format: dict[str, int] = field(default_factory=dict)
    passed: dict[str, str] = field(default_factory=dict)
    first_rejects: list[Reject] = field(default_factory=list)
    read_bytes: int = 0
    total_bytes: int = 0
    skip_bad: bool = False
    dry_run: bool = False

    @property
    def passed_files(self) -> list[str]:
        return list(self.passed)

    @property
    def exit_code(self) -> int:
        return 1 if self.rejected and not self.skip_bad else 0

    def to_json(self) -> dict[str, Any]:
        rejects = []
        for reject in self.first_rejects:
            shown = reject.to_json()
            del shown["raw"]
            rejects.append(shown)
        return {
            "published": self.published,
            "already_published": self.already_published,
            "rejected": self.rejected,
            "same_id_other_content": self.same_id_other_content,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "files": self.files,
            "by_format": self.by_format,
            "passed_files": self.passed_files,
            "rejects": rejects,
            "dry_run": self.dry_run,
        }


def check_rejects(path: Path, inputs: Sequence[Source]) -> None:
    """Raises `UsageError` where bad records could not be written to this file, or would overwrite an input."""
    if any(source.path is not None and source.path.resolve() == path.resolve() for source in inputs):
        raise UsageError(f"the rejects would overwrite the input {path}")
    if not path.parent.is_dir():
        raise UsageError(f"the rejects cannot be written to {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"the rejects cannot be written to {path}", hint="name a file that you may write")


class Rejects:
    """Counts rejects into a report and writes them to a file as JSON lines, for repair and another publish."""

    def __init__(self, report: Report, path: Path | None) -> None:
        self._report, self._path = report, path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Rejects:
        if self._path is not None:
            self._file = open(self._path, "wb")
        return self

    def add(self, reject: Reject) -> None:
        self._report.rejected += 1
        if len(self._report.first_rejects) < SHOWN:
            self._report.first_rejects.append(reject)
        if self._file is not None:
            self._file.write(orjson.dumps(reject.to_json(), option=orjson.OPT_APPEND_NEWLINE))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
