"""What a publish did, and what it refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

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
    rejected, first_rejects: bad records, and the first of them.
    passed_files: files found in folders that hold no JSON.
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
    passed_files: list[str] = field(default_factory=list)
    first_rejects: list[Reject] = field(default_factory=list)
    read_bytes: int = 0
    total_bytes: int = 0
    skip_bad: bool = False
    dry_run: bool = False

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
