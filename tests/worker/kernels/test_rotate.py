"""The kernel of norms, RoPE and tails, in both languages, compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.kernels.arguments import Rotate, Rotation
from kvd.worker.attention.kernels.language import CUDA, METAL, Language
from kvd.worker.attention.kernels.launch import Launch, rotate_launch
from protocol.pages import TAIL_TOKENS
from tests.worker.kernels import build
from tests.worker.kernels.run import check_rules, run
from tests.worker.kernels.wrap import wrap

TAILS, Q_HEADS, HEADS, V_DIM = 3, 6, 2, 64
OFFSETS = [0, 4097, 77, 31]
PLAIN = Rotation(80, traditional=False)
BOUNDS = {mx.float32: 2e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}

pytestmark = pytest.mark.mlx


def noise(*shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def given(
    rotation: Rotation,
    k_dim: int,
    dtype: mx.Dtype,
    token_places: list[int],
    token_rows: list[int] | None,
) -> Rotate:
    tails = [noise(TAILS, HEADS, TAIL_TOKENS, dim, dtype=dtype) for dim in (k_dim, V_DIM)]
    batch = TAILS + 1
    weights = tuple(noise(k_dim, dtype=dtype) + shift for shift in (1, 2))
    frequencies = 1e4 ** (-np.arange(rotation.dims // 2) / (rotation.dims // 2))
    qkv = [
        noise(batch, 1, Q_HEADS * k_dim, dtype=dtype),
        noise(batch, 1, HEADS * k_dim, dtype=dtype) + 1,
        noise(batch, 1, HEADS * V_DIM, dtype=dtype),
    ]
    return Rotate(
        rotation,
        mx.concatenate(qkv, axis=-1),
        Q_HEADS,
        mx.array(OFFSETS, mx.int32),
        mx.array(frequencies, mx.float32),
        weights if rotation.normed else None,
        *tails,
        mx.array(token_places, mx.int32),
        None if token_rows is None else mx.array(token_rows, mx.int32),
    )


def rotated_in_float64(arguments: Rotate, vectors: mx.array, heads: int, weight: int) -> np.ndarray:
    """Return ``[batch, heads, dim]`` after norm and RoPE, as in the RoFormer paper."""
    rotation = arguments.rotation
    x = wide(vectors).reshape(len(OFFSETS), heads, -1)
    if arguments.weights is not None:
        x = (
            x
            / np.sqrt((x**2).mean(-1, keepdims=True) + rotation.eps)
            * wide(arguments.weights[weight])
        )
    half = rotation.dims // 2
    first = slice(0, rotation.dims, 2) if rotation.traditional else slice(half)
    second = slice(1, rotation.dims, 2) if rotation.traditional else slice(half, rotation.dims)
    # Angles are float32, as in every implementation; the rest is float64 here.
    frequencies = np.array(arguments.frequencies)
    angles = (np.array(OFFSETS, np.float32)[:, None, None] * frequencies).astype(np.float64)
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first] = a * np.cos(angles) - b * np.sin(angles)
    x[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return x


CASES = {
    "plain": (PLAIN, 80, mx.float32, [5, TAIL_TOKENS - 1, 0], None),
    "normed": (Rotation(128, False, True, 1e-6), 128, mx.bfloat16, [5, 6, 7], None),
    "partial": (Rotation(64, True, True, 1e-3), 96, mx.float16, [7, -1, 100], [1, 0, 0]),
    "traditional": (Rotation(64, True), 64, mx.bfloat16, [-1, -1, 9], [0, 0, 3]),
    "all commit a page": (PLAIN, 80, mx.float32, [TAIL_TOKENS + 63, 127, TAIL_TOKENS], None),
    "one commits a page": (
        Rotation(128, False, True),
        128,
        mx.bfloat16,
        [3, TAIL_TOKENS + 9, -1],
        [1, 0, 2],
    ),
}
"""Rotation, head size and dtype; each tail's place of the new token, and the token's row."""


def check(
    run: Callable[[Rotate], Sequence[np.ndarray]],
    rotation: Rotation,
    k_dim: int,
    dtype: mx.Dtype,
    token_places: list[int],
    token_rows: list[int] | None,
) -> None:
    arguments = given(rotation, k_dim, dtype, token_places, token_rows)
    ends = [Q_HEADS * k_dim, (Q_HEADS + HEADS) * k_dim]
    old_queries, old_keys, old_values = mx.split(arguments.qkv, ends, axis=-1)

    queries, keys, values = run(arguments)

    want = rotated_in_float64(arguments, old_queries, Q_HEADS, 0)
    assert np.isfinite(queries).all()
    assert np.abs(queries[:, :, 0] - want).max() <= BOUNDS[dtype] * np.abs(want).max()
    new_keys = rotated_in_float64(arguments, old_keys, HEADS, 1)
    new_values = wide(old_values).reshape(len(OFFSETS), HEADS, V_DIM)
    for got, before, new, bound in (
        (keys, arguments.tail_keys, new_keys, BOUNDS[dtype]),
        (values, arguments.tail_values, new_values, 0),
    ):
        tails = wide(before)
        for tail, token_place in enumerate(token_places):
            place = token_place % TAIL_TOKENS
            if token_place >= TAIL_TOKENS:
                tails[tail, :, : TAIL_TOKENS // 2] = tails[tail, :, TAIL_TOKENS // 2 :]
            if token_place >= 0:
                token = new[tail if token_rows is None else token_rows[tail]]
                assert np.abs(got[tail, :, place] - token).max() <= bound * np.abs(token).max()
                tails[tail, :, place] = got[tail, :, place]
        assert np.array_equal(got, tails)  # all other tokens are unchanged


@pytest.mark.parametrize("language", [METAL, CUDA], ids=["metal", "cuda"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_results_match_float64(language: Language, case: tuple[Any, ...]) -> None:
    def run_rotate(arguments: Rotate) -> list[np.ndarray]:
        launch = rotate_launch(language, arguments)
        if language is METAL:
            check_rules(launch)
        return run(launch, language.name)

    check(run_rotate, *case)


@pytest.mark.skipif(build.find_clang() is None, reason="needs clang++ 17 or newer")
def test_clang_accepts_the_address_spaces_of_the_text() -> None:
    arguments = given(Rotation(64, False, True, 1e-6), 64, mx.bfloat16, [1, 2, 3], [0, 1, 2])
    assert build.refused_by_clang(wrap(rotate_launch(METAL, arguments), "metal")) == ""


def test_kernels_with_different_parameters_have_different_names() -> None:
    one = given(Rotation(64, False, True, 1e-6), 64, mx.bfloat16, [1, 2, 3], None)
    others = [
        replace(one, rotation=replace(one.rotation, eps=1e-5)),
        replace(one, rotation=replace(one.rotation, traditional=True)),
        replace(one, rotation=replace(one.rotation, dims=32)),
        replace(one, rotation=replace(one.rotation, normed=False), weights=None),
        replace(one, token_rows=mx.array([0, 1, 2])),
    ]
    launches: list[Launch] = [rotate_launch(CUDA, arguments) for arguments in (one, *others)]
    assert len({launch.name for launch in launches}) == len(launches)
