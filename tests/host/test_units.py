"""Sizes and durations: parsing and formatting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.host.units import (
    format_bytes,
    format_duration,
    parse_bytes,
    parse_keep_alive,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("1073741824", 2**30),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("500MB", 500_000_000),
        (" 2KiB ", 2048),
        ("8G", 8 * 2**30),
        ("64k", 65_536),
    ],
)
def test_sizes_as_people_write_them(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "many", "-1", "8 XB", "8GiB8", "1e9", "GiB", "8,5GB"])
def test_the_error_for_an_invalid_size_shows_how_to_write_one(text):
    with pytest.raises(ValueError, match="write it like 8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("4096", 4096), (" 4k", 4096), ("64K", 65_536), ("1.5k", 1536), ("1M", 2**20)],
)
def test_numbers_of_tokens(text, expected):
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "k", "1.5", "4kB", "8GiB", "1e3", "\u0661k", "9" * 400])
def test_the_error_for_an_invalid_number_of_tokens_shows_how_to_write_one(text):
    with pytest.raises(ValueError, match="write it like 4096 or 64k"):
        parse_tokens(text)


@given(st.integers(1, 2**60))
def test_a_formatted_size_is_short_and_close(count):
    text = format_bytes(count)
    assert len(text) <= 13
    if count < 900 * 2**40:
        assert parse_bytes(text.replace(" ", "")) == pytest.approx(count, rel=0.06)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.5B", "9" * 400, "9e9TiB".replace("e9", "0" * 9)])
def test_zero_and_enormous_sizes_are_out_of_range(text):
    with pytest.raises(ValueError, match="out of range"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0s"), (59.9, "59s"), (61, "1m 1s"), (3 * 3600 + 720, "3h 12m"), (90000, "1d 1h")],
)
def test_durations(seconds, expected):
    assert format_duration(seconds) == expected


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (300, 300),
        ("300", 300),
        ("5m", 300),
        (" 1h30m ", 5400),
        ("1d", 86_400),
        ("500ms", 0.5),
        ("1.5s", 1.5),
        (0, 0),
        ("0", 0),
        ("0m", 0),
        (-1, -1),
        ("-1m", -60),
        ("365d", 31_536_000),
    ],
)
def test_parse_keep_alive(given, seconds: float):
    assert parse_keep_alive(given) == seconds


@pytest.mark.parametrize(
    "given",
    ["", "-", "soon", "5 m", "1h30", "1e3", "5m\n5m", "366d", 1e12, 10**400, float("nan"), "m5"],
)
def test_parse_keep_alive_refuses_what_is_no_time(given):
    with pytest.raises(ValueError, match="is not a time to stay loaded"):
        parse_keep_alive(given)
