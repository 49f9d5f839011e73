"""Draws by a kernel: all rows of a step that need no sorting, in one launch.

The kernel is compared with MLX's operations at load (`prepare`), and is not used if their tokens
differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvd.worker.attention.kernels import launch
from kvd.worker.attention.kernels.language import Language
from kvd.worker.grammar import masking
from kvd.worker.sampling.draw_kernel import draw_launch
from kvd.worker.sampling.draws import BatchSampling, sample
from kvd.worker.sampling.valid_logits import finite_and_varied
from protocol.types import Sampling

_log = logging.getLogger("kvd.worker")

_CHECKED = (
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.6, min_p=0.05, seed=2),
    Sampling(temperature=1.5, seed=3),
)
"""Settings of the rows that `prepare` compares."""


_prepared: dict[int, DirectDraws | None] = {}
"""What was found for each size of a vocabulary."""


def prepare(vocabulary: int, dtype: mx.Dtype) -> None:
    """Compile and check the kernel for a model's logits; ``dtype``: theirs. Edits make float32."""
    if (language := launch.find_language()) is None:
        return
    dtypes = tuple(dict.fromkeys((dtype, mx.float32)))
    direct = DirectDraws(language, dtypes)
    try:
        wrong = [one for one in dtypes if not direct.is_right(vocabulary, one)]
    except Exception as error:  # noqa: BLE001 - the model is served without the kernel
        _log.warning("tokens are drawn without a kernel: %s", repr(error)[:500])
        wrong = list(dtypes)
    else:
        if wrong:
            _log.warning("tokens are drawn without a kernel: those for %s differ", wrong)
    _prepared[vocabulary] = None if wrong else direct


def prepared(vocabulary: int) -> DirectDraws | None:
    """Return what `prepare` has found for this vocabulary; None: there is no kernel for it."""
    return _prepared.get(vocabulary)


class DirectDraws:
    """The kernel for logits of certain dtypes."""

    def __init__(self, language: Language, dtypes: Sequence[mx.Dtype]) -> None:
        self._language = language
        self._dtypes = tuple(dtypes)

    def draw(
        self, logits: Any, masks: Any, batch: BatchSampling, positions: Sequence[int]
    ) -> tuple[Any, Any]:
        """Return the tokens of greedy and plain rows, ``[rows]`` int32, and which logits are valid.

        The tokens of other rows are those of a greedy draw. ``logits``, ``masks``, ``positions``:
        see `kvd.worker.sampling.sampler.Sampler.draw`. Both results are lazy.
        """
        if logits.dtype not in self._dtypes:
            logits = logits.astype(mx.float32)
        words = None if masks is None else masks.view(mx.uint32)
        keys = batch.direct_keys(positions)
        given = draw_launch(self._language, logits, words, batch.direct, keys)
        tokens, valid = launch.run(given, self._language)
        return tokens, valid

    def is_right(self, vocabulary: int, dtype: mx.Dtype) -> bool:
        """Compare the kernel's tokens with those of MLX's operations, with and without masks."""
        rows, positions = len(_CHECKED), list(range(len(_CHECKED)))
        noise = mx.random.normal((rows, vocabulary), key=mx.random.key(0))
        logits = (4 * noise).astype(dtype)
        shape = (rows, 4 * -(-vocabulary // 32))
        bits = mx.random.randint(0, 256, shape, key=mx.random.key(1)).astype(mx.uint8)
        batch, plain = BatchSampling.of(_CHECKED, by_kernel=True), BatchSampling.of(_CHECKED)
        for masks in (None, bits):
            tokens, valid = self.draw(logits, masks, batch, positions)
            allowed = logits if masks is None else masking.masked(logits, masks)
            right = (tokens == sample(allowed, plain, positions)).all()
            if not (right & (valid == finite_and_varied(logits)).all()).item():
                return False
        broken = mx.where(mx.arange(vocabulary) == vocabulary // 2, mx.nan, logits)
        flat = mx.zeros_like(logits)
        return not any(
            self.draw(one, None, batch, positions)[1].any().item() for one in (broken, flat)
        )
