"""Loads a definition file by its path, under a private module name: nothing is put on sys.path."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from megaflow_stream.errors import NotFound, SettingError

T = TypeVar("T")
_loading = threading.RLock()  # no thread sees a module that another has begun to execute


def load_module(path: Path) -> ModuleType:
    """The module at `path`, loaded once a process. Raises `SettingError` with the file and line of what went wrong."""
    with _loading:
        return _load(path.resolve())


def _load(path: Path) -> ModuleType:
    name = f"_megaflow_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise NotFound(f"there is no definition file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        frame = error.__traceback__
        line = None
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == str(path):
                line = frame.tb_lineno
            frame = frame.tb_next
        if isinstance(error, SyntaxError):
            line = error.lineno
        raise SettingError(
            f"the definition could not be loaded: {type(error).__name__}: {error}", file=path, line=line
        ) from error
    return module


def definitions(path: Path, kind: type[T]) -> list[T]:
    """The definitions of one kind that a file declares, in the order in which it does."""
    found: list[T] = []
    for value in vars(load_module(path)).values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, kind) and item not in found:
                found.append(item)
    return found
