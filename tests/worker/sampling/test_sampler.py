"""Sampled tokens follow a plain numpy reference, and do not depend on the batch."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.sampling.draws import (
    BatchSampling,
    filter_plain,
    filter_ranked,
    key_of,
    sample,
)
from kvd.worker.sampling.largest import largest, pick
from kvd.worker.sampling.valid_logits import finite_and_varied
from protocol.errors import LocalProtocolError
from protocol.types import Sampling
from tests.cpu_time import takes_less_than

pytestmark = pytest.mark.mlx

KINDS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, seed=2),
    Sampling(temperature=1.3, top_p=0.9, seed=3),
    Sampling(temperature=1.0, top_k=5, seed=4),
    Sampling(temperature=2.0, min_p=0.1, seed=5),
    Sampling(temperature=0.8, top_p=0.8, top_k=7, min_p=0.05, seed=6),
    Sampling(temperature=1.5, top_p=0.5, min_p=0.3, seed=7),
    Sampling(temperature=1.0, top_k=1, seed=8),
    Sampling(temperature=3.0, top_p=0.99, top_k=3, seed=9),
    Sampling(temperature=1.0, min_p=1.0, seed=10),
    Sampling(temperature=1.0, top_k=70, seed=11),
    Sampling(temperature=0.9, top_p=0.95, top_k=100, min_p=0.01, seed=12),
]


def reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the probabilities that mlx-lm's chain of samplers draws from, one token at a time."""
    logits = logits.astype(np.float64)
    logprobs = logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()
    if sampling.temperature == 0:
        return np.eye(len(logits))[np.argmax(logprobs)]
    if sampling.top_p < 1.0:
        ranked = sorted(range(len(logits)), key=lambda token: -logprobs[token])
        mass, last = 0.0, ranked[0]
        for token in ranked:
            if mass >= sampling.top_p:
                break
            mass, last = mass + np.exp(logprobs[token]), token
        logprobs = np.where(logprobs < logprobs[last], -np.inf, logprobs)
    if sampling.min_p > 0:
        floor = logprobs.max() + np.log(sampling.min_p)
        logprobs = np.where(logprobs < floor, -np.inf, logprobs)
    if sampling.top_k > 0:
        ranked = np.argsort(-logprobs, kind="stable")
        logprobs[ranked[sampling.top_k :]] = -np.inf
    weights = np.exp((logprobs - logprobs.max()) / sampling.temperature)
    return weights / weights.sum()


def make_logits(rows, vocab, seed=0, scale=2.0):
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * scale).astype(np.float32)


def draw_many(logits, sampling, draws):
    """Draw from one row at positions 0, 1, 2 ..., with many positions as rows of one batch."""
    width = 500
    batch = BatchSampling.of([sampling] * width)
    rows = mx.broadcast_to(mx.array(logits), (width, logits.shape[-1]))
    steps = [list(range(at, at + width)) for at in range(0, draws, width)]
    return np.concatenate([np.array(sample(rows, batch, step)) for step in steps])


@pytest.mark.parametrize("sampling", KINDS, ids=str)
def test_draws_follow_the_reference(sampling):
    logits = make_logits(1, 24, seed=11)[0]
    expected = reference(logits, sampling)
    draws = 10_000
    counts = np.bincount(draw_many(logits, sampling, draws), minlength=24)
    assert counts[expected == 0].sum() == 0
    # The chi-square test needs at least five expected draws in each cell. By the normal
    # approximation, right samplers pass with 99.9999 % of all seeds.
    cells = expected * draws >= 5
    chi2 = np.sum((counts[cells] - expected[cells] * draws) ** 2 / (expected[cells] * draws))
    freedom = max(1, cells.sum() - 1)
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5
    assert counts[cells].sum() > 0.99 * draws


def test_the_chi_square_bound_can_fail():
    logits = make_logits(1, 24, seed=11)[0]
    expected = reference(logits, Sampling(temperature=1.0))
    counts = np.bincount(draw_many(logits, Sampling(temperature=1.2, seed=1), 10_000), minlength=24)
    cells = expected * 10_000 >= 5
    chi2 = np.sum((counts[cells] - expected[cells] * 10_000) ** 2 / (expected[cells] * 10_000))
    assert chi2 > 23 + 5 * np.sqrt(46) + 5


@pytest.mark.parametrize("sampling", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_support_equals_that_of_the_reference(sampling, seed):
    """At temperature 10, all tokens that the filters keep are drawn, and no others."""
    logits = make_logits(1, 12, seed=seed)[0]
    hot = Sampling(
        temperature=10.0 if sampling.temperature else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
    )
    kept = set(np.flatnonzero(reference(logits, hot)))
    assert set(draw_many(logits, hot, 500)) == kept


@pytest.mark.parametrize("sampling", [one for one in KINDS if one.temperature], ids=str)
def test_filters_keep_the_same_tokens_as_mlx_lm(sampling):
    from mlx_lm import sample_utils

    for seed in range(8):
        logits = make_logits(1, 300, seed=seed)
        kept = mx.array(logits) - mx.logsumexp(mx.array(logits), axis=-1, keepdims=True)
        if sampling.top_p < 1.0:
            kept = sample_utils.apply_top_p(kept, sampling.top_p)
        if sampling.min_p > 0.0:
            kept = sample_utils.apply_min_p(kept, sampling.min_p)
        if sampling.top_k > 0:
            kept = sample_utils.apply_top_k(kept, sampling.top_k)
        batch = BatchSampling.of([sampling])
        if batch.plain is not None:
            mine = filter_plain(batch.plain, mx.array(logits))
        else:
            mine = filter_ranked(batch.ranked, mx.array(logits))
        assert mx.isfinite(mine).tolist() == mx.isfinite(kept).tolist()


@pytest.mark.parametrize("width", [5, 64, 1000, 8192, 8193, 40_001])
def test_largest_equals_a_sort(width):
    rows = make_logits(3, width, seed=width)
    rows[1, 10:] = -np.inf
    rows[2] = np.round(rows[2])
    values, places = largest(mx.array(rows), 64)
    expected = -np.sort(-rows, axis=-1)[:, :64]
    assert np.array_equal(np.array(values), expected)
    found = np.array(places)
    for row in range(3):
        assert len(set(found[row].tolist())) == min(64, width)
        real = np.isfinite(expected[row])
        assert np.array_equal(rows[row][found[row][real]], expected[row][real])


@pytest.mark.parametrize("top_k", [1, 20, 64, 65, 100, 5000])
def test_top_k_is_exact_among_equal_logits(top_k):
    for vocab in (300, 20_000):
        logits = np.round(make_logits(1, vocab, seed=3))
        batch = BatchSampling.of([Sampling(temperature=1.0, top_k=top_k, seed=1)])
        kept = filter_ranked(batch.ranked, mx.array(logits))
        assert np.isfinite(np.array(kept)).sum() == min(top_k, vocab)


def test_top_p_keeps_ties_and_top_k_is_exact():
    logits = np.array([3.0, 1.0, 1.0, 1.0, 0.0], dtype=np.float32)
    first = np.exp(3.0) / np.exp(logits).sum()
    assert set(draw_many(logits, Sampling(temperature=9.0, top_p=first + 0.01, seed=1), 500)) == {
        0, 1, 2, 3,
    }  # fmt: skip
    equal = np.zeros(8, dtype=np.float32)
    assert set(draw_many(equal, Sampling(temperature=1.0, top_k=3, seed=1), 500)) == {0, 1, 2}


@pytest.mark.parametrize("vocab", [7, 4096, 50_257])
def test_a_row_draws_the_same_tokens_in_any_batch(vocab):
    rows = len(KINDS)
    logits = mx.array(make_logits(rows, vocab, seed=5))
    positions = [3 * row for row in range(rows)]
    alone = [
        sample(logits[row : row + 1], BatchSampling.of([KINDS[row]]), [positions[row]]).item()
        for row in range(rows)
    ]
    order = np.random.default_rng(0)
    for size in (2, 3, 5, rows):
        chosen = order.permutation(rows)[:size].tolist()
        batch = BatchSampling.of([KINDS[row] for row in chosen])
        tokens = sample(logits[mx.array(chosen)], batch, [positions[row] for row in chosen])
        assert tokens.tolist() == [alone[row] for row in chosen]


def test_positions_and_seeds_give_different_draws():
    logits = mx.array(make_logits(1, 1000, scale=0.1))
    rows = mx.broadcast_to(logits, (64, 1000))
    one = Sampling(temperature=1.0, seed=42)
    by_position = sample(rows, BatchSampling.of([one] * 64), list(range(64))).tolist()
    seeds = [Sampling(temperature=1.0, seed=seed) for seed in range(64)]
    by_seed = sample(rows, BatchSampling.of(seeds), [0] * 64).tolist()
    assert len(set(by_position)) > 50
    assert len(set(by_seed)) > 50
    assert by_position == sample(rows, BatchSampling.of([one] * 64), list(range(64))).tolist()


def test_keys_are_distinct_words_of_32_bits():
    keys = {key_of(seed, position) for seed in range(50) for position in range(200)}
    assert len(keys) == 10_000
    assert all(0 <= word < 2**32 for key in keys for word in key)
    gamma = 0x9E3779B97F4A7C15
    assert key_of(5 + gamma, 0) != key_of(5, 1)
    assert key_of(2**63 - 1, 2**31) != key_of(0, 0)
    choices = {key_of(3, position, choice) for position in range(200) for choice in range(16)}
    assert len(choices) == 3200
    assert key_of(3, 5, 0) == key_of(3, 5)


def test_greedy_ignores_filters_and_tiny_temperatures_are_greedy():
    logits = mx.array(make_logits(3, 100))
    kinds = [Sampling(top_p=0.1, top_k=3), Sampling(temperature=1e-9, seed=1), Sampling()]
    tokens = sample(logits, BatchSampling.of(kinds), [0, 0, 0])
    assert tokens.dtype == mx.int32
    assert tokens.tolist() == mx.argmax(logits, axis=-1).tolist()


def test_excluded_tokens_are_never_drawn():
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[[7, 9]] = [0.0, 1.0]
    for kind in KINDS[1:]:
        assert set(draw_many(logits, kind, 500)) <= {7, 9}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_draw_as_their_float32_values(dtype):
    logits = mx.array(make_logits(len(KINDS), 64)).astype(dtype)
    batch = BatchSampling.of(KINDS)
    positions = [0] * len(KINDS)
    assert (
        sample(logits, batch, positions).tolist()
        == sample(logits.astype(mx.float32), batch, positions).tolist()
    )


def test_top_k_beyond_the_vocabulary_keeps_all():
    logits = make_logits(1, 10)[0]
    wide = draw_many(logits, Sampling(temperature=10.0, top_k=1000, seed=1), 500)
    assert set(wide) == set(range(10))


def test_a_sampled_row_needs_a_seed():
    with pytest.raises(LocalProtocolError, match="seed"):
        BatchSampling.of([Sampling(temperature=1.0)])


def test_rows_with_invalid_logits_are_detected():
    rows = [
        [1.0, 2.0, 3.0],
        [0.0, 0.0, 0.0],
        [1.0, np.nan, 2.0],
        [np.nan] * 3,
        [1.0, np.inf, 2.0],
        [-np.inf] * 3,
        [-np.inf, 1.0, 2.0],
        [2.0, 2.0, 2.0],
    ]
    good = finite_and_varied(mx.array(np.array(rows, dtype=np.float32)))
    assert good.tolist() == [True, False, False, False, False, False, True, False]


def test_sampling_a_step_of_sixteen_rows_is_fast():
    """Detects an accidental eval or a Python loop over tokens; the usual time is 2 ms."""
    logits = mx.array(make_logits(16, 4096))
    batch = BatchSampling.of([KINDS[1], KINDS[3]] * 8)
    mx.eval(sample(logits, batch, [0] * 16))

    def draw() -> None:
        for step in range(10):
            mx.eval(sample(logits, batch, [step] * 16))

    assert takes_less_than(1, draw)


def test_large_integers_are_picked_exactly() -> None:
    rows = mx.array([[2**24 - 1, 2**24 - 2, 7]], dtype=mx.int32)
    found = pick(rows, mx.array([[1, 0]], dtype=mx.uint32))

    assert found.dtype == mx.int32
    assert found.tolist() == [[2**24 - 2, 2**24 - 1]]
