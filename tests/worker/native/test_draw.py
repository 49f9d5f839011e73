"""The native draw gives the tokens of MLX's operations, and those of a row alone."""

from __future__ import annotations

from types import ModuleType

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.sampling.direct_draws import LibraryDraws, is_right
from kvd.worker.sampling.draws import BatchSampling
from kvd.worker.sampling.valid_logits import finite_and_varied
from protocol.types import Sampling
from tests.worker.sampling.draw_cases import (
    ROWS,
    ZERO,
    ZERO_TOKEN,
    ZERO_VOCABULARY,
    expected,
    masks_of,
    noise,
    some_masks,
)

pytestmark = pytest.mark.mlx


def drawn(
    library: ModuleType, logits: mx.array, rows: list[Sampling], masks: mx.array | None = None
) -> tuple[list[int], list[int]]:
    batch = BatchSampling.of(rows, direct=True)
    tokens, valid = LibraryDraws(library).draw(logits, masks, batch, list(range(len(rows))))
    return tokens.tolist(), valid.tolist()


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 8, 9, 33, 511, 1025, 4096, 40_001])
def test_tokens_are_those_of_operations(library: ModuleType, vocabulary: int) -> None:
    for seed in range(3):
        logits = noise(len(ROWS), vocabulary, seed)
        for masks in (None, some_masks(len(ROWS), vocabulary)):
            tokens, valid = drawn(library, logits, ROWS, masks)
            assert tokens == expected(logits, ROWS, masks)
            assert valid == finite_and_varied(logits).tolist()
    assert is_right(LibraryDraws(library), vocabulary + 2, mx.float32)


@pytest.mark.parametrize("spread", [0.01, 30.0])
def test_flat_and_steep_logits(library: ModuleType, spread: float) -> None:
    logits = spread * noise(len(ROWS), 5000)
    assert drawn(library, logits, ROWS)[0] == expected(logits, ROWS)


def test_of_equal_logits_the_first_ones_are_the_largest(library: ModuleType) -> None:
    logits = mx.round(noise(len(ROWS), 1200) / 2)
    assert drawn(library, logits, ROWS)[0] == expected(logits, ROWS)


def test_a_row_without_allowed_tokens_has_token_0(library: ModuleType) -> None:
    logits = noise(len(ROWS), 100)
    masks = masks_of(100, [[]] * len(ROWS))
    assert drawn(library, logits, ROWS, masks)[0] == [0] * len(ROWS)


@pytest.mark.parametrize("more", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_an_excluded_token_is_not_drawn_instead_of_one_with_the_random_number_0(
    library: ModuleType, more: dict[str, float]
) -> None:
    logits, masks = noise(1, ZERO_VOCABULARY), masks_of(ZERO_VOCABULARY, [[ZERO_TOKEN]])
    row = msgspec.structs.replace(ZERO, **more)
    assert drawn(library, logits, [row], masks) == ([ZERO_TOKEN], [1])


@pytest.mark.parametrize("place", [0, 7, 600, 1199])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_are_noticed_wherever_they_are(
    library: ModuleType, place: int, value: float
) -> None:
    rows = [one for one in (ROWS[0], ROWS[1], ROWS[7]) for _ in range(3)]
    logits = noise(len(rows), 1200)
    for first in range(0, len(rows), 3):
        logits[first + 1, place] = value
        logits[first + 2] = 0.0
    tokens, valid = drawn(library, logits, rows)
    assert valid == [1, int(value == -np.inf), 0] * 3
    assert tokens[::3] == expected(logits, rows)[::3]
    assert all(0 <= token < 1200 for token in tokens)


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 8.0]),
    top_p=st.sampled_from([0.001, 0.5, 0.9, 0.999999, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 65, 299, 300, 301, 5000]),
    min_p=st.sampled_from([0.0, 0.01, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(SETTINGS, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_any_settings(library: ModuleType, rows: list[Sampling], seed: int) -> None:
    logits = noise(len(rows), 300, seed)
    tokens, _ = drawn(library, logits, rows)
    assert tokens == expected(logits, rows)
    alone, _ = drawn(library, logits[:1], rows[:1])
    assert alone == tokens[:1]


def test_arguments_are_checked(library: ModuleType) -> None:
    logits, settings, keys = mx.zeros((2, 40)), mx.zeros((2, 4)), mx.zeros((2, 2), mx.uint32)
    for wrong in (
        (logits[0], settings, keys, None),
        (logits, settings[:, :2], keys, None),
        (logits, settings, keys[:1], None),
        (logits, settings, keys, mx.zeros((2, 4), mx.uint8)),
        (logits, settings, keys, mx.zeros((1, 5), mx.uint8)),
    ):
        with pytest.raises(ValueError, match="draw takes"):
            library.draw(*wrong)
