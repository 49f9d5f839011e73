"""`bench/fidelity`: recipes, its passes over texts, and the same numbers with kvd's own pages."""

from __future__ import annotations

import math
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from bench.fidelity import llama
from bench.fidelity.cache import FakeQuantizedCache, make_caches
from bench.fidelity.flow import Score, Texts, run, steps
from bench.fidelity.recipes import LAYOUTS, Side, parse
from kvd import demo
from kvd.worker.cache.scheme import Scheme, full_pages
from kvd.worker.serving import model_files, seam
from kvd.worker.tools import fidelity

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def loaded():
    seam.install()
    found = model_files.load(demo.path())
    found.model.set_dtype(mx.float32)
    return found


def dense(tokens: int, seed: int = 0) -> mx.array:
    rng = np.random.default_rng(seed)
    return mx.array(rng.normal(size=(1, 2, tokens, 64)).astype(np.float32))


def error(side: Side, x: mx.array) -> float:
    y = side(x)
    mx.eval(y)
    assert np.isfinite(np.array(y)).all()
    return float(mx.square(y - x).mean().item())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_error_of_each_layout_is_small_and_falls_with_more_bits(layout):
    x = dense(128)
    errors = [error(Side(bits, layout), x) for bits in (2, 4, 8)]
    assert errors[0] > 10 * errors[1] > 100 * errors[2] > 0
    assert errors[2] < 1e-4
    assert error(Side(16, layout), x) == 0


def test_an_outlier_channel_adds_error_to_its_own_group_only():
    x = np.array(dense(64))
    x[..., 5] *= 100
    others = [index for index in range(64) if index != 5]
    y = {name: np.array(Side(4, name)(mx.array(x))) for name in ("channel", "token")}
    off = {name: np.square(got - x)[..., others].mean() for name, got in y.items()}
    assert off["channel"] < 0.02 < off["token"] / 10


@pytest.mark.parametrize("option", ["clip", "refit"])
def test_clipped_and_refitted_scales_lower_the_square_error(option):
    plain, other = (parse(name).keys for name in ("k3v3", f"k3v3:{option}"))
    x = dense(256)
    assert error(other, x) < error(plain, x)


def test_the_name_of_a_recipe_defines_what_is_stored():
    recipe = parse("k4v8:hadamard:vg32:sink64:no-tail")
    assert recipe.keys == Side(4, "hadamard")
    assert recipe.values == Side(8, "token", group=32)
    assert (recipe.sinks, recipe.tail) == (64, False)
    assert parse("k4v4").bytes_to_dense(4096, 6) == 0.28125
    assert parse("k4v4:fine4").bytes_to_dense(4096, 6) == pytest.approx(0.28125 + 4 / 32 / 6)
    by_layer = parse("k4v4:by-k3v3-k8v2")
    assert [(one.keys.bits, one.values.bits) for one in map(by_layer.at, (0, 1))] == [
        (3, 3),
        (8, 2),
    ]
    assert by_layer.bytes_to_dense(4096, 2) == pytest.approx(0.28125)
    for wrong in ("k4", "k4v4:sink5", "k4v4:nonsense"):
        with pytest.raises(ValueError):
            parse(wrong)


def test_pages_are_quantized_at_the_same_lengths_as_in_kvd():
    recipe, bare = parse("k4v4"), parse("k4v4:no-tail")
    for length in range(1, 400):  # of the row after a decode step
        assert recipe.sealed(length - 1) == 64 * full_pages(length)
        assert bare.sealed(length - 1) == (length - 1) // 64 * 64


@pytest.mark.parametrize("length", [10, 300, 700])
def test_no_page_is_quantized_within_a_decoding_pass(length):
    cuts = list(steps(length, 256, 256))
    assert [start for start, _, _ in cuts] == [0, *(stop for _, stop, _ in cuts[:-1])]
    assert cuts[-1][1] == length
    for recipe in (parse("k4v4"), parse("k4v4:no-tail")):
        for start, stop, decoding in cuts:
            if decoding:
                assert {recipe.sealed(before) for before in range(start, stop)} == {
                    recipe.sealed(start)
                }


def test_the_cache_shows_quantized_pages_and_an_exact_tail():
    recipe = parse("k4v4:head8")
    cache = FakeQuantizedCache(recipe)
    keys, values = dense(300, 1), dense(300, 2)
    cache.update_and_fetch(keys[:, :, :256], values[:, :, :256])
    assert not cache.lossy
    shown, _ = cache.update_and_fetch(keys[:, :, 256:], values[:, :, 256:])
    assert cache.lossy
    np.testing.assert_array_equal(np.array(shown[:, :, 192:]), np.array(keys[:, :, 192:]))
    off = np.abs(np.array(shown - keys)).reshape(2, 300, 64).max(axis=(0, 2))
    assert 0 < off[:64].max() < 0.03 < off[64:192].max()


def test_kl_is_zero_for_the_same_logits_and_right_for_others():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(3, 50)) * 3 for _ in range(2))
    b[0], b[1] = a[0], a[1] + rng.normal(size=50) * 1e-3
    targets = mx.array([1, 2, 3])
    got = [np.array(one) for one in fidelity.compare(mx.array(a), mx.array(b), targets)]
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (a, b))
    np.testing.assert_allclose(got[0], (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-3, atol=1e-12)
    assert got[0][0] == 0
    np.testing.assert_allclose(got[2], -p[[0, 1, 2], [1, 2, 3]], rtol=1e-5)
    np.testing.assert_array_equal(got[1], p.argmax(axis=1) == q.argmax(axis=1))


def test_dense_pages_cost_nothing_and_few_bits_cost_much(loaded):
    texts = Texts(np.array(fidelity.texts(loaded.tokenizer, count=1, tokens=512), np.int32), 4)
    recipes = [parse(name) for name in ("k16v16:sink64", "k8v8", "k2v2")]
    scores = {one.name: Score() for one in recipes}
    right = run(loaded.model, texts, recipes, scores, decoded=192)
    assert right == 4
    none, eight, two = (score.parts()["decode"] for score in scores.values())
    assert abs(none.kl) < 1e-9
    assert none.top1 == 1
    assert 0 < eight.kl < 1e-3 < two.kl
    assert scores["k16v16:sink64"].recall == 1


@pytest.mark.slow
def test_kvds_own_pages_give_the_same_numbers(loaded):
    """Compare pages, flushes and attention of kvd with fake quantization of dense arrays."""
    scheme = Scheme(8, 4)  # unequal, so that swapped keys and values would be noticed
    (prompt,) = fidelity.texts(loaded.tokenizer, count=1, tokens=500)
    (level,) = fidelity.measure([fidelity.serve(loaded.model, [scheme])], [prompt], decoded=130)
    recipe = parse(scheme.name)
    scores = {recipe.name: Score()}
    run(loaded.model, Texts(np.array([prompt], np.int32)), [recipe], scores, decoded=130)
    parts = scores[recipe.name].parts().values()
    positions = sum(part.positions for part in parts)
    product = level
    assert product.positions == positions
    for field in ("kl", "top1", "dense_nll", "nll"):
        fake = sum(getattr(part, field) * part.positions for part in parts) / positions
        assert math.isfinite(fake)
        assert getattr(product, field) == pytest.approx(fake, rel=5e-3, abs=2e-6), field


def test_layers_that_a_recipe_does_not_quantize_keep_their_cache():
    class Model:
        layers = (None, None)

    seam.install()
    caches = make_caches(Model(), parse("k4v4:only1"))
    assert [isinstance(cache, FakeQuantizedCache) for cache in caches] == [False, True]


def test_mlx_lms_own_cache_stores_every_token_quantized(loaded):
    recipe = parse("k4v4:mlx-lm")
    (cache, *_) = make_caches(loaded.model, recipe)
    keys, values = dense(300, 1), dense(300, 2)
    cache.update_and_fetch(keys[:, :, :256], values[:, :, :256])
    assert not cache.lossy  # kvd's caches are exact in their first pass, so it counts for none
    stored = cache.update_and_fetch(keys[:, :, 256:], values[:, :, 256:])
    assert cache.lossy
    per_token = Side(4, "token")
    for found, whole in zip(stored, (keys, values), strict=True):
        shown = mx.dequantize(*found, group_size=64, bits=4)
        np.testing.assert_array_equal(np.array(shown), np.array(per_token(whole)))
    assert recipe.bytes_to_dense(4096, 6) == parse("k4v4").bytes_to_dense(4096, 6)
    for wrong in ("k8v4:mlx-lm", "k4v4:mlx-lm:no-tail"):
        with pytest.raises(ValueError, match="mlx-lm's cache"):
            parse(wrong)


def test_mlx_lms_own_cache_is_compared_at_the_positions_of_kvds(loaded):
    texts = Texts(np.array(fidelity.texts(loaded.tokenizer, count=1, tokens=512), np.int32), 4)
    recipes = [parse(name) for name in ("k8v8", "k8v8:mlx-lm")]
    scores = {one.name: Score() for one in recipes}
    run(loaded.model, texts, recipes, scores, decoded=192)
    kvd, mlx_lm = (score.parts() for score in scores.values())
    assert {part: one.positions for part, one in kvd.items()} == {
        part: one.positions for part, one in mlx_lm.items()
    }
    assert 0 < kvd["decode"].kl < mlx_lm["decode"].kl < 0.1


# llama.cpp's caches.

VOCABULARY = 8
WRITES_LOGITS = f"""#!{sys.executable}
import struct, sys
tokens = struct.iter_unpack("i", sys.stdin.buffer.read())
best = 1 if sys.argv[2] == "f32" else 2
for (token,) in tokens:
    row = [float(one == (token + best) % {VOCABULARY}) for one in range({VOCABULARY})]
    sys.stdout.buffer.write(struct.pack("{VOCABULARY}f", *row))
"""


@pytest.fixture
def program(tmp_path):
    """A program with the interface of `bench/llama/logits.cpp`.

    The reference predicts the next number, other types the one after it.
    """
    file = tmp_path / "program"
    file.write_text(WRITES_LOGITS)
    file.chmod(0o755)
    return file


def test_llama_logits_are_compared_position_by_position(program, tmp_path):
    tokens = np.arange(700, dtype=np.int32) % VOCABULARY
    scores, right = llama.measure(program, tmp_path, Texts(tokens[None], 4))
    assert right == 4  # the text counts up, as the reference predicts
    assert set(scores) == {"f16", "q8_0", "q4_0"}
    # Logits are 1 for one token and 0 for the others, and the one differs.
    kl = (math.e - 1) / (math.e + VOCABULARY - 1)
    for score in scores.values():
        parts = score.parts()
        # The last 256 of 699 inputs are decoded, and the first 256 count for neither part.
        assert (parts["prefill"].positions, parts["decode"].positions) == (187, 256)
        assert [part.top1 for part in parts.values()] == [0, 0]
        assert [part.kl for part in parts.values()] == pytest.approx([kl, kl], rel=1e-5)
        assert score.recall == 0


def test_a_failure_of_llama_logits_is_no_result(program, tmp_path):
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(subprocess.CalledProcessError):
        llama.measure(program, tmp_path, Texts(np.zeros((1, 700), np.int32), 4))
