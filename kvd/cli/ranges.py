"""Ranges of numbers whose maximum only keeps them representable: help does not show it."""

from __future__ import annotations

import math
from typing import Any

import rich_click as click

from protocol.fields import MAX_INT, MAX_S


class Number(click.FloatRange):
    """A range without NaN, which click's comparisons accept."""

    name = "number"

    def __init__(self, low: float, high: float) -> None:
        super().__init__(low, high)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return number


class Count(click.IntRange):
    """An integer up to `MAX_INT`."""

    def __init__(self, low: int | None = None) -> None:
        super().__init__(low, MAX_INT)

    def _describe_range(self) -> str:
        return _described(self.min)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if _exceeds(value, MAX_INT):
            self.fail(f"{value} is too large; the maximum is {MAX_INT}.", param, ctx)
        count: int = super().convert(value, param, ctx)
        return count


class Seconds(Number):
    """A duration of at least this many seconds, up to a year."""

    name = "number of seconds"

    def __init__(self, low: float) -> None:
        super().__init__(low, MAX_S)

    def _describe_range(self) -> str:
        return _described(self.min)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if _exceeds(value, MAX_S):
            self.fail(f"{value} is too large; the maximum is {MAX_S:.0f}.", param, ctx)
        return super().convert(value, param, ctx)


def _described(low: float | None) -> str:
    return "" if low is None else f"x>={low}"


def _exceeds(value: Any, high: float) -> bool:
    try:
        return float(value) > high
    except (TypeError, ValueError):
        return False
    except OverflowError:
        return True
