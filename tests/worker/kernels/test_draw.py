"""The kernel that draws tokens gives those of MLX's operations, in both languages."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.kernels.language import CUDA, METAL, Language
from kvd.worker.sampling.direct_draws import KernelDraws
from kvd.worker.sampling.draw_kernel import draw_launch
from kvd.worker.sampling.draws import BatchSampling
from kvd.worker.sampling.valid_logits import finite_and_varied
from protocol.types import Sampling
from tests.worker.kernels.run import check_rules, run
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

LANGUAGES = pytest.mark.parametrize("language", [METAL, CUDA], ids=["metal", "cuda"])
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


def drawn(
    language: Language, logits: mx.array, rows: list[Sampling], masks: mx.array | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel's tokens, and which logits it takes as valid."""
    batch = BatchSampling.of(rows, direct=True)
    words = None if masks is None else masks.view(mx.uint32)
    keys = batch.all_keys(list(range(len(rows))))
    launch = draw_launch(language, logits, words, batch.direct, keys)
    if language is METAL:
        check_rules(launch)
    tokens, valid = run(launch, language.name)
    return tokens, valid


@LANGUAGES
@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(1, "float32"), (2, "float16"), (33, "bfloat16"), (511, "float32"), (1025, "bfloat16")],
)
def test_tokens_are_those_of_operations(language: Language, dtype: str, vocabulary: int) -> None:
    logits = noise(len(ROWS), vocabulary, vocabulary).astype(DTYPES[dtype])
    for masks in (None, some_masks(len(ROWS), vocabulary)):
        tokens, valid = drawn(language, logits, ROWS, masks)
        assert tokens.tolist() == expected(logits, ROWS, masks)
        assert valid.tolist() == finite_and_varied(logits).tolist()


@LANGUAGES
def test_few_allowed_tokens_are_drawn_among_all_threads(language: Language) -> None:
    vocabulary = 1500
    logits = noise(len(ROWS), vocabulary)
    some = [[7], [1499], [3, 749, 750, 1499], list(range(740, 760)), []]
    masks = masks_of(vocabulary, some + some)
    tokens, valid = drawn(language, logits, ROWS, masks)
    for row, (token, want) in enumerate(zip(tokens, expected(logits, ROWS, masks), strict=True)):
        assert token == (want if (some + some)[row] else 0)
    assert valid.all()


@LANGUAGES
def test_of_equal_logits_the_first_ones_are_the_largest(language: Language) -> None:
    logits = mx.round(noise(len(ROWS), 1200) / 2)  # a dozen different values
    tokens, _ = drawn(language, logits, ROWS)
    assert tokens.tolist() == expected(logits, ROWS)


@LANGUAGES
def test_broken_logits_are_noticed_wherever_they_are(language: Language) -> None:
    rows, places = [ROWS[0], ROWS[1], ROWS[7]] * 4, [0, 31, 600, 1199]
    values = [0.0, np.nan, np.inf, -np.inf]
    for value in values:
        logits = noise(len(rows), 1200)
        for row in range(len(rows)):
            logits[row, places[row % 4]] = value
        tokens, valid = drawn(language, logits, rows)
        finite = value in (0.0, -np.inf)
        assert valid.tolist() == [int(finite)] * len(rows)
        if finite:
            assert tokens.tolist() == expected(logits, rows)
        assert (tokens >= 0).all()
        assert (tokens < 1200).all()
    assert not drawn(language, mx.zeros((2, 1200)), rows[:2])[1].any()


@LANGUAGES
def test_an_excluded_token_is_not_drawn_instead_of_one_with_the_random_number_0(
    language: Language,
) -> None:
    logits, masks = noise(1, ZERO_VOCABULARY), masks_of(ZERO_VOCABULARY, [[ZERO_TOKEN]])
    tokens, valid = drawn(language, logits, [ZERO], masks)
    assert (tokens.tolist(), valid.tolist()) == ([ZERO_TOKEN], [1])


def test_masks_for_fewer_tokens_are_refused() -> None:
    kernel = KernelDraws(CUDA, (mx.float32,))
    batch = BatchSampling.of(ROWS[:2], direct=True)
    with pytest.raises(ValueError, match="a bit for each token"):
        kernel.draw(noise(2, 33), mx.zeros((2, 4), mx.uint8), batch, [0, 0])
