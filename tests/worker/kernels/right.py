"""Compares the decode kernels' results with dense attention."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tests.worker.kernels.decoding import Step

BOUNDS = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-3}
"""Bounds of the relative error, including the rounding of results to the dtype."""


def assert_right(step: Step, got: np.ndarray) -> None:
    """Compare with dense attention: finite, zero for padding, each row within the bound."""
    want, rows = step.expected(), len(step.case.rows)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert (got[rows:] == 0).all()
    bound = BOUNDS[step.case.dtype]
    expected = want[:rows].reshape(rows, -1, want.shape[-1])
    difference = got[:rows].reshape(expected.shape) - expected
    assert (_norm(difference, (1, 2)) <= bound * _norm(expected, (1, 2))).all()
    # Rounding alone can push a single vector slightly over the bound.
    assert (_norm(difference, 2) <= 2 * bound * _norm(expected, 2)).all()


def _norm(of: np.ndarray, axes: int | tuple[int, ...]) -> np.ndarray:
    return np.sqrt((of**2).sum(axes))
