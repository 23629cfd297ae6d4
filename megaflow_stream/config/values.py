"""One value of a document, a variable or a flag, turned into the type that its setting has."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from megaflow_stream.config.units import parse_bytes, parse_duration

Kind = Literal["text", "integer", "number", "flag", "bytes", "seconds", "texts"]

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def from_yaml(kind: Kind, raw: Any) -> Any:
    """A value as YAML gives it. Raises `ValueError` that says what was expected."""
    return _FROM_YAML[kind](raw)


def from_text(kind: Kind, text: str) -> Any:
    """A value as the environment or a flag gives it. Raises `ValueError` that says what was expected."""
    return _FROM_TEXT[kind](text)


def suggestion(word: str, known: Iterable[str]) -> str:
    """`did you mean ...?`, or what there is, for a word that is not known."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"known are: {', '.join(names)}"


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        # YAML 1.1 reads no, on and 12345 as other things than the text that was meant.
        raise _expected("text", raw, ": put it in quotes, or YAML reads it as something else")
    return raw


def _integer(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise _expected("a whole number", raw)
    return raw


def _number(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not math.isfinite(raw):
        raise _expected("a number", raw)
    return float(raw)


def _flag(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise _expected("true or false", raw)
    return raw


def _texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list):
        raise _expected("a list of names", raw)
    return tuple(_text(item.value) for item in raw)


def _integer_text(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, not {text!r}") from None


def _number_text(text: str) -> float:
    try:
        return _number(float(text))
    except ValueError:
        raise ValueError(f"must be a number, not {text!r}") from None


def _flag_text(text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise ValueError(f"must be one of {', '.join(TRUE + FALSE)}, not {text!r}")
    return text.lower() in TRUE


def _texts_text(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _expected(what: str, raw: Any, advice: str = "") -> ValueError:
    return ValueError(f"must be {what}, not {_show(raw)}{advice}")


def _show(raw: Any) -> str:
    if isinstance(raw, dict):
        return "a mapping"
    if isinstance(raw, list):
        return "a list"
    return "nothing" if raw is None else repr(raw)


_FROM_YAML: dict[str, Callable[[Any], Any]] = {
    "text": _text,
    "integer": _integer,
    "number": _number,
    "flag": _flag,
    "bytes": parse_bytes,
    "seconds": parse_duration,
    "texts": _texts,
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "text": str,
    "integer": _integer_text,
    "number": _number_text,
    "flag": _flag_text,
    "bytes": parse_bytes,
    "seconds": parse_duration,
    "texts": _texts_text,
}
