"""The page of `kvctl explain`: complete numbers at any width, their origin, and the verdict."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvd.cli.explain import page
from protocol.forecast import Forecast, LevelCost, ReclaimStep
from protocol.segments import PrefixSpace

MIB = 2**20
VALUE = Forecast(
    model="demo",
    source="demo",
    state="ready",
    measured=True,
    context=16_384,
    rows=64,
    weights_bytes=11 * MIB,
    base_bytes=386 * MIB,
    idle_bytes=400 * MIB,
    levels=[
        LevelCost(
            scheme=scheme,
            token_bytes=tokens,
            row_bytes=rows * MIB,
            start_bytes=2 * MIB,
            total_bytes=(400 + 64 * rows) * MIB,
            max_rows=1200 // rows,
        )
        for scheme, tokens, rows in (("k8v8", 1728, 33), ("k8v4", 1344, 26), ("k4v4", 960, 19))
    ],
    budget_bytes=1600 * MIB,
    available_bytes=100 * MIB,
    held_bytes=402 * MIB,
    missing_bytes=900 * MIB,
    steps=[
        ReclaimStep(method="spare", model="other", nbytes=14 * MIB),
        ReclaimStep(method="precision", model="demo", nbytes=448 * MIB, level=1),
        ReclaimStep(method="idle", model="other", nbytes=400 * MIB),
        ReclaimStep(method="preempt", model="third", nbytes=38 * MIB),
    ],
    shortfall_bytes=0,
    verdict="makes_room",
)


def shown(value: Forecast, width: int = 80, *asked: int) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(page(value, *asked))
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width):
    text = shown(VALUE, width)

    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for part in ("0  k8v8", "1.7 KiB", "33.0 MiB", "64 ROWS", "step rows of demo down to level 1"):
        assert part in text


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        ("fits", "64 rows of 16,384 tokens at k8v8: fits now"),
        ("makes_room", "These steps would make room:"),
        ("waits", "requests wait until others end"),
        ("never", "never fits. Even k4v4 needs"),
    ],
)
def test_the_verdict_is_shown(verdict, text):
    value = replace(VALUE, verdict=verdict, shortfall_bytes=5 * MIB)

    assert text in " ".join(shown(value, 200).split())


def test_a_question_beyond_the_models_limits_is_answered_with_the_limits():
    within = shown(VALUE, 100, 16_384, 64)
    assert "refused" not in within
    assert "max_rows" not in within
    beyond = shown(VALUE, 100, 100_000, 65)
    assert "Its context is 16,384 tokens; longer requests are refused." in beyond
    assert "At most 64 rows run at once (max_rows); more requests wait." in beyond


def test_the_origin_of_the_numbers_is_shown():
    assert "measured by its worker" in shown(VALUE)
    assert "estimated from its files" in shown(replace(VALUE, measured=False, state="not loaded"))


def test_what_the_prefix_store_has_is_shown():
    assert "On disk" not in shown(VALUE)
    stored = PrefixSpace(models=["demo"], tokens=12_800, nbytes=30 * MIB, hits=7, saved_s=90.0)
    text = " ".join(shown(replace(VALUE, stored=stored), 200).split())
    assert "On disk are 12,800 prompt tokens in 30.0 MiB; 7 prompts read some, which saved" in text
