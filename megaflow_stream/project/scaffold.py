"""A new project: the reference pipeline, copied from where this package has it.

In a wheel the scaffold is package data, `megaflow_stream/scaffold`; in a clone it is the root of the clone, which is
the reference project itself. Both hold the same folders.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import megaflow_stream
from megaflow_stream.config.load import FILE
from megaflow_stream.errors import SettingError, UsageError

FOLDERS = ("topics", "processors", "trainers", "infra")
IGNORED = """\
# Data, credentials and logs of the embedded services and of runs.
.megaflow/
__pycache__/
"""


def source(package: Path | None = None) -> Path:
    """The folder that holds the scaffold, for the package at `package` (default: this one)."""
    package = package or Path(megaflow_stream.__file__).parent
    for folder in (package / "scaffold", package.parent):
        if (folder / FILE).is_file() and all((folder / name).is_dir() for name in FOLDERS):
            return folder
    raise SettingError(
        f"the installation at {package} has no scaffold",
        hint="install the wheel of megaflow-stream again, or work in a clone",
    )


def init(target: Path, package: Path | None = None) -> Path:
    """Makes a project in `target`, a new or empty folder, and returns it. Raises `UsageError` for any other."""
    scaffold = source(package)
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is not an empty folder", hint="name a new folder: nothing is overwritten")
    target.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        shutil.copytree(scaffold / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".*"))
    (target / ".gitignore").write_text(IGNORED, encoding="utf-8")
    # Last: a folder whose copying was cut short is no project.
    shutil.copy(scaffold / FILE, target / FILE)
    return target
