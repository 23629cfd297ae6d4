"""YAML with the file and line of every key and value, so that an error can point at what is wrong.

Keys are text; a key given twice is an error (PyYAML would silently take the last one). So is a number that YAML 1.1
reads as another one than it says: 010 as 8, 1:30 as 90.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from megaflow_stream.errors import NotFound, SettingError

_DEEPEST = 50  # levels; a document of ours has five
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OTHER_BASE = re.compile(r"[-+]?0[0-9_]+|.*:.*")  # octal, and base 60


@dataclass(frozen=True, slots=True)
class Located:
    """A value and its place. `value` is a `dict[str, Located]`, a `list[Located]` or a plain scalar.

    `line` counts from 1; for the value of a mapping it is the line of its key.
    """

    value: Any
    file: Path
    line: int

    def error(self, message: str, hint: str = "") -> SettingError:
        return SettingError(message, hint=hint, file=self.file, line=self.line)


def read_yaml(path: Path) -> Located:
    """The one document of a file. Raises `NotFound`, and `SettingError` for what is not YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the file cannot be read: {error}", file=path) from error
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> Located:
    """As `read_yaml`, for text that stands in `path`. An empty document is an empty mapping."""
    loader: Any = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return Located({}, path, 1)
        return _Walk(loader, path).visit(node, node.start_mark.line + 1, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise SettingError(f"this is not YAML: {error.problem or error.context}", file=path, line=line) from error
    except yaml.YAMLError as error:
        raise SettingError(f"this is not YAML: {error}", file=path) from error
    finally:
        if loader is not None:
            loader.dispose()


class _Walk:
    def __init__(self, loader: Any, path: Path) -> None:
        self.loader, self.path = loader, path

    def visit(self, node: Node, line: int, depth: int) -> Located:
        if depth > _DEEPEST:  # also ends a document that contains itself by an alias
            raise SettingError("the document is nested too deeply", file=self.path, line=line)
        value: Any
        if isinstance(node, MappingNode):
            value = self.mapping(node, depth)
        elif isinstance(node, SequenceNode):
            value = [self.visit(item, item.start_mark.line + 1, depth + 1) for item in node.value]
        else:
            value = self.scalar(node, line)
        return Located(value, self.path, line)

    def scalar(self, node: Node, line: int) -> Any:
        try:
            value = self.loader.construct_object(node)
        except ValueError as error:  # 2026-99-99 looks like a date to YAML
            raise SettingError(f"{node.value!r} is not a value: {error}", file=self.path, line=line) from error
        if node.tag in _NUMBERS and _OTHER_BASE.fullmatch(node.value):
            message, hint = f"{node.value} is {value} to YAML", "write a number in plain decimals, and text in quotes"
            raise SettingError(message, hint=hint, file=self.path, line=line)
        return value

    def mapping(self, node: MappingNode, depth: int) -> dict[str, Located]:
        found: dict[str, Located] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode):
                raise SettingError("a key must be plain text", file=self.path, line=line)
            if key.value in found:
                first = found[key.value].line
                message = f"the key {key.value!r} is given twice, first on line {first}"
                raise SettingError(message, hint="remove one of them", file=self.path, line=line)
            found[key.value] = self.visit(value, line, depth + 1)
        return found
