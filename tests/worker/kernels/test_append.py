"""The kernel that writes a step's tokens into tails, in both languages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.kernels.arguments import Append
from kvd.worker.attention.kernels.language import CUDA, METAL, Language
from kvd.worker.attention.kernels.launch import append_launch
from protocol.pages import TAIL_TOKENS
from tests.worker.kernels.run import check_rules, run

TAILS, HEADS, K_DIM, V_DIM = 3, 2, 80, 64


def _noise(*shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def given(dtype: mx.Dtype, token_places: list[int], token_rows: list[int] | None) -> Append:
    return Append(
        *(_noise(TAILS, HEADS, TAIL_TOKENS, dim, dtype=dtype) for dim in (K_DIM, V_DIM)),
        *(_noise(TAILS + 1, HEADS, 1, dim, dtype=dtype) for dim in (K_DIM, V_DIM)),
        mx.array(token_places, mx.int32),
        None if token_rows is None else mx.array(token_rows, mx.int32),
    )


def _floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


PLACES = [
    ([5, TAIL_TOKENS - 1, 0], None),
    ([7, -1, 100], [1, 0, 0]),
    ([TAIL_TOKENS + 63, 5, TAIL_TOKENS], None),
    ([TAIL_TOKENS + 63, -1, 9], [2, 0, 1]),
]
"""For each tail, the place of its new token and the row that the token comes from."""
NAMES = ["own rows", "other rows", "some commit a page", "other rows, one commits a page"]


def check(
    run: Callable[[Append], Sequence[np.ndarray]],
    dtype: mx.Dtype,
    token_places: list[int],
    token_rows: list[int] | None,
) -> None:
    arguments = given(dtype, token_places, token_rows)
    tails, new = (arguments.tail_keys, arguments.tail_values), (arguments.keys, arguments.values)
    for before, tokens, got in zip(tails, new, run(arguments), strict=True):
        want = _floats(before)
        for tail, place in enumerate(token_places):
            if place >= TAIL_TOKENS:
                want[tail, :, : TAIL_TOKENS // 2] = want[tail, :, TAIL_TOKENS // 2 :]
            if place >= 0:
                giver = tail if token_rows is None else token_rows[tail]
                want[tail, :, place % TAIL_TOKENS] = _floats(tokens)[giver, :, 0]
        assert np.array_equal(got, want)


@pytest.mark.parametrize("language", [METAL, CUDA], ids=["metal", "cuda"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("token_places", "token_rows"), PLACES, ids=NAMES)
def test_each_tail_gets_its_token_and_is_otherwise_unchanged(
    language: Language, dtype: mx.Dtype, token_places: list[int], token_rows: list[int] | None
) -> None:
    def run_append(arguments: Append) -> list[np.ndarray]:
        launch = append_launch(language, arguments)
        if language is METAL:
            check_rules(launch)
        return run(launch, language.name)

    check(run_append, dtype, token_places, token_rows)
