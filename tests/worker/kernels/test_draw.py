"""The kernel that draws tokens gives those of MLX's operations, in both languages."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.attention.kernels.language import CUDA, METAL, Language
from kvd.worker.grammar.masking import masked
from kvd.worker.sampling.draw_kernel import draw_launch
from kvd.worker.sampling.draws import BatchSampling, sample
from kvd.worker.sampling.valid_logits import finite_and_varied
from protocol.types import Sampling
from tests.worker.kernels.run import check_rules, run

LANGUAGES = pytest.mark.parametrize("language", [METAL, CUDA], ids=["metal", "cuda"])
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
ROWS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.6, min_p=0.05, seed=2),
    Sampling(temperature=5.0, seed=3),
    Sampling(temperature=1.0, min_p=1.0, seed=4),
]


def drawn(
    language: Language, logits: mx.array, rows: list[Sampling], masks: mx.array | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel's tokens, and which logits it takes as valid."""
    batch = BatchSampling.of(rows, by_kernel=True)
    words = None if masks is None else masks.view(mx.uint32)
    keys = batch.direct_keys(list(range(len(rows))))
    launch = draw_launch(language, logits, words, batch.direct, keys)
    if language is METAL:
        check_rules(launch)
    tokens, valid = run(launch, language.name)
    return tokens, valid


def expected(logits: mx.array, rows: list[Sampling], masks: mx.array | None = None) -> list[int]:
    allowed = logits if masks is None else masked(logits, masks)
    tokens = sample(allowed, BatchSampling.of(rows), list(range(len(rows))))
    return list(tokens.tolist())


def masks_of(vocabulary: int, allowed: list[list[int]]) -> mx.array:
    bits = np.zeros((len(allowed), -(-vocabulary // 32) * 32), np.uint8)
    for row, tokens in enumerate(allowed):
        bits[row, tokens] = 1
    return mx.array(np.packbits(bits, axis=1, bitorder="little"))


@LANGUAGES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 2, 31, 33, 511, 1025, 2500])
def test_tokens_are_those_of_operations(language: Language, dtype: str, vocabulary: int) -> None:
    noise = 3 * mx.random.normal((len(ROWS), vocabulary), key=mx.random.key(vocabulary))
    logits = noise.astype(DTYPES[dtype])
    shape = (len(ROWS), 4 * -(-vocabulary // 32))
    masks = mx.random.randint(0, 256, shape, key=mx.random.key(1)).astype(mx.uint8)
    masks[:, 0] |= 1  # some token is allowed
    for given_masks in (None, masks):
        tokens, valid = drawn(language, logits, ROWS, given_masks)
        assert tokens.tolist() == expected(logits, ROWS, given_masks)
        assert valid.tolist() == finite_and_varied(logits).tolist()


@LANGUAGES
def test_few_allowed_tokens_are_drawn_among_all_threads(language: Language) -> None:
    vocabulary = 1500
    noise = mx.random.normal((len(ROWS), vocabulary), key=mx.random.key(0))
    allowed = [[7], [1499], [3, 749, 750, 1499], list(range(740, 760)), []]
    masks = masks_of(vocabulary, allowed)
    tokens, valid = drawn(language, noise, ROWS, masks)
    assert tokens.tolist()[:4] == expected(noise, ROWS, masks)[:4]
    assert tokens[4] == 0
    assert valid.all()


@LANGUAGES
def test_a_greedy_row_takes_the_first_of_equal_logits(language: Language) -> None:
    logits = mx.zeros((2, 1200))
    logits[0, 900] = logits[0, 600] = 1.0
    logits[1, 5] = -1.0
    tokens, _ = drawn(language, logits, [Sampling(), Sampling()])
    assert tokens.tolist() == [600, 0]


@LANGUAGES
@pytest.mark.parametrize("place", [0, 31, 600, 1199])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_are_noticed_wherever_they_are(
    language: Language, place: int, value: float
) -> None:
    rows = [Sampling(temperature=1.0, seed=1)] * 3
    logits = mx.random.normal((3, 1200), key=mx.random.key(3))
    logits[1, place] = value
    logits[2] = 0.0
    tokens, valid = drawn(language, logits, rows)
    assert valid.tolist() == [True, value == -np.inf, False]
    assert tokens[0] == expected(logits, rows)[0]
    assert (tokens >= 0).all()
    assert (tokens < 1200).all()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_row_draws_the_same_token_in_any_batch(data: st.DataObject) -> None:
    seeds = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4, unique=True))
    rows = [Sampling(temperature=1.0, seed=seed) for seed in seeds]
    logits = mx.random.normal((len(rows), 700), key=mx.random.key(4))
    tokens, _ = drawn(CUDA, logits, rows)
    assert tokens.tolist() == expected(logits, rows)
