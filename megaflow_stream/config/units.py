"""Quantities as people write them: sizes in bytes, durations in seconds.

A spelling is taken or refused, never guessed: `2gi`, which some tools read as 2 bytes and others as 2 GiB, is an
error that names the spellings there are.
"""

from __future__ import annotations

import re
from fractions import Fraction

# IEC 80000-13 (KiB), its Kubernetes short form (Ki), and SI (kB).
BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
SECONDS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
BYTES_SPELLINGS = "a whole number of bytes, or a number and one of KiB MiB GiB TiB, Ki Mi Gi Ti, kB MB GB TB (64GiB)"
SECONDS_SPELLINGS = "a number and one of ms s m h d (500ms, 30s, 15m, 2h, 1d)"

_QUANTITY = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")
_LARGEST_BYTES = 2**63 - 1  # Kafka's and the kernel's sizes are signed 64-bit numbers
_LONGEST_SECONDS = 366 * 86400 * 100


def parse_bytes(text: str | int) -> int:
    """`64GiB`, `64Gi`, `1.5GB`, `4096`, 4096 -> bytes. Raises `ValueError` that names the accepted spellings."""
    if isinstance(text, int) and not isinstance(text, bool):
        size = Fraction(text)
    else:
        number, unit = _split(text, BYTES_SPELLINGS)
        if not unit:
            unit = "B"
        if unit not in BYTES:
            raise ValueError(f"{text!r} has no unit of size that is known: write {BYTES_SPELLINGS}{_near(unit, BYTES)}")
        size = number * BYTES[unit]
    if size.denominator != 1 or not 0 <= size <= _LARGEST_BYTES:
        raise ValueError(f"{text!r} is not a whole number of bytes from 0 to 2^63 - 1")
    return int(size)


def parse_duration(text: str) -> float:
    """`500ms`, `30s`, `15m`, `2h`, `1d` -> seconds. Raises `ValueError` that names the accepted spellings."""
    number, unit = _split(text, SECONDS_SPELLINGS)
    if unit not in SECONDS:
        raise ValueError(f"{text!r} has no unit of time that is known: write {SECONDS_SPELLINGS}{_near(unit, SECONDS)}")
    seconds = number * SECONDS[unit]
    if seconds > _LONGEST_SECONDS:
        raise ValueError(f"{text!r} is more than a hundred years")
    return float(seconds)


def show_bytes(size: int) -> str:
    """The shortest exact spelling: 67108864 -> `64MiB`, 1500 -> `1500`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % BYTES[unit] == 0:
            return f"{size // BYTES[unit]}{unit}"
    return str(size)


def show_duration(seconds: float) -> str:
    """The shortest exact spelling: 7200.0 -> `2h`, 0.5 -> `500ms`."""
    exact = Fraction(str(seconds))
    for unit in ("d", "h", "m", "s", "ms"):
        if exact and (exact / SECONDS[unit]).denominator == 1:
            return f"{exact / SECONDS[unit]}{unit}"
    return f"{seconds:g}s"


def _split(text: object, spellings: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not understood: write {spellings}")
    return Fraction(match[1]), match[2]


def _near(unit: str, known: dict[str, int] | dict[str, Fraction]) -> str:
    """A hint for a unit that is known in another case: 2gi is not taken, but Gi is what was likely meant."""
    same = [name for name in known if name.lower() == unit.lower()]
    return f"; did you mean {same[0]}?" if same else ""
