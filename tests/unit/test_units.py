"""Sizes and durations: what is taken, and that everything else is refused with the accepted spellings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.config.units import parse_bytes, parse_duration, show_bytes, show_duration


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 << 30),
        ("64Gi", 64 << 30),
        ("64 GiB", 64 << 30),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("4096", 4096),
        ("7B", 7),
        ("10kB", 10_000),
        ("2TiB", 2 << 40),
        (4096, 4096),
        (0, 0),
    ],
)
def test_a_size_is_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "2gi",
        "2GI",
        "2g",
        "64G",
        "64gib",
        "64gb",
        "2M",
        "2m",
        "GiB",
        "",
        " 2GiB",
        "2GiB ",
        "2  GiB",
        "-1GiB",
        "1e9",
        "1_0",
        "1,5GB",
        "½GiB",
        "٣GiB",
        "nan",
        "2 Gi B",
        "2GiB/s",
        None,
        True,
        1.5,
        [],
        "9" * 30,
    ],
)
def test_a_wrong_size_names_the_spellings(text: object) -> None:
    with pytest.raises(ValueError, match="KiB MiB GiB TiB, Ki Mi Gi Ti, kB MB GB TB"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ValueError, match="did you mean Gi"):
        parse_bytes("2gi")


@pytest.mark.parametrize("text", ["0.3KiB", -1, "9000000TiB", "0.0001B"])
def test_a_size_is_a_whole_number_that_fits(text: str | int) -> None:
    with pytest.raises(ValueError, match="whole number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30.0), ("15m", 900.0), ("2h", 7200.0), ("1d", 86400.0), ("1.5h", 5400.0), ("0s", 0.0)],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["30", "2H", "2hours", "1h30m", "-1s", "", "s", "1w", "1 day", 30, None, "inf", "1e3s"]
)
def test_a_wrong_duration_names_the_spellings(text: object) -> None:
    with pytest.raises(ValueError, match="ms s m h d"):
        parse_duration(text)  # type: ignore[arg-type]


def test_a_duration_of_centuries_is_refused() -> None:
    with pytest.raises(ValueError, match="hundred years"):
        parse_duration("999999999d")


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_a_shown_size_is_read_back(size: int) -> None:
    assert parse_bytes(show_bytes(size)) == size


@given(st.integers(min_value=0, max_value=10**10))
def test_a_shown_duration_is_read_back(milliseconds: int) -> None:
    assert parse_duration(show_duration(milliseconds / 1000)) == milliseconds / 1000
