"""A mapping of a project file, read key by key; what is left over is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megaflow_stream.config.values import Kind, from_yaml, suggestion
from megaflow_stream.config.yaml import Located

T = TypeVar("T")


class Table:
    """The keys of `located`, called `what` in messages."""

    def __init__(self, located: Located, what: str) -> None:
        if not isinstance(located.value, dict):
            raise located.error(f"{what} must be a mapping")
        self.located, self.what = located, what
        self.left: dict[str, Located] = dict(located.value)
        self.known: list[str] = []

    def take(self, key: str, kind: Kind, default: Any = None, *, least: float | None = None) -> Any:
        """The value of `key`, or the default where it is not there. Raises `SettingError` with its line."""

        def parse(raw: Any) -> Any:
            value = from_yaml(kind, raw)
            if least is not None and value < least:
                raise ValueError(f"must be at least {least:g}, not {value:g}")
            return value

        return self.parsed(key, parse, default)

    def choice(self, key: str, choices: tuple[str, ...], default: Any = None) -> Any:
        def parse(raw: Any) -> Any:
            if raw not in choices:
                raise ValueError(f"must be one of {', '.join(choices)}, not {raw!r}")
            return raw

        return self.parsed(key, parse, default)

    def parsed(self, key: str, parse: Callable[[Any], T], default: T) -> T:
        """The value of `key` through `parse`, whose `ValueError` becomes a `SettingError` with the line."""
        located = self.taken(key)
        if located is None:
            return default
        try:
            return parse(located.value)
        except ValueError as error:
            raise located.error(f"{self.what}: {key}: {error}") from None

    def taken(self, key: str) -> Located | None:
        """The value and place of `key`, None where it is not there."""
        self.known.append(key)
        return self.left.pop(key, None)

    def end(self) -> None:
        """Refuses the keys that nobody took."""
        for key, located in self.left.items():
            raise located.error(f"{self.what} has no key {key!r}", suggestion(key, self.known))
