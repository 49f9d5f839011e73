"""What the decode kernels' results are held to."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tests.worker.kernels.decoding import Step

BOUNDS = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-3}
"""Of the relative error, results rounded to the dtype included."""


def assert_right(step: Step, got: np.ndarray) -> None:
    """Compare with dense attention: finite, zero for the padding, row by row within the bound."""
    want, rows = step.expected(), len(step.case.rows)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert (got[rows:] == 0).all()
    bound = BOUNDS[step.case.dtype]
    wanted = want[:rows].reshape(rows, -1, want.shape[-1])
    difference = got[:rows].reshape(wanted.shape) - wanted
    assert (_norm(difference, (1, 2)) <= bound * _norm(wanted, (1, 2))).all()
    # Rounding alone can take a single vector a little beyond.
    assert (_norm(difference, 2) <= 2 * bound * _norm(wanted, 2)).all()


def _norm(of: np.ndarray, axes: int | tuple[int, ...]) -> np.ndarray:
    return np.sqrt((of**2).sum(axes))
