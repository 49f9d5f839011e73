"""Draws by a single operation: a kernel on Metal and CUDA, the native library on the CPU.

The kernel is compared with MLX's operations at load (`prepare`), and is not used if their tokens
differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx

from kvd.worker.artifacts.checks import Checks
from kvd.worker.attention.kernels import launch
from kvd.worker.attention.kernels.language import Language
from kvd.worker.grammar import masking
from kvd.worker.sampling.draw_kernel import draw_launch
from kvd.worker.sampling.draws import BatchSampling, sample
from protocol.types import Sampling

_log = logging.getLogger("kvd.worker")

_CHECKED = (
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.6, min_p=0.05, seed=2),
    Sampling(temperature=1.0, top_p=0.9, seed=3),
    Sampling(temperature=1.5, top_k=40, seed=4),
)
"""Settings of the rows that `prepare` compares."""


class DirectDraws(Protocol):
    """Draws the tokens of a step in one operation."""

    def draw(
        self, logits: Any, masks: Any, batch: BatchSampling, positions: Sequence[int]
    ) -> tuple[Any, Any]:
        """Return each row's token, ``[rows]`` int32, and whether its logits are valid, ``[rows]``.

        The arguments are those of `kvd.worker.sampling.sampler.Sampler.draw`. ``batch``: the rows'
        settings, made with ``direct``. Both results are lazy.
        """


_prepared: dict[int, DirectDraws | None] = {}
"""The operation by size of the vocabulary; None: a chain of MLX's operations draws."""


def prepare(
    vocabulary: int, dtype: mx.Dtype, library: ModuleType | None, checks: Checks | None = None
) -> None:
    """Find out how tokens are drawn for a model; compile and check the kernel on accelerators.

    ``dtype``: that of the model's logits. Edited ones are float32. ``library``: the native library;
    None except on CPUs. ``checks``: results of earlier loads.
    """
    found: DirectDraws | None = None if library is None else LibraryDraws(library)
    if (language := launch.find_language()) is not None:
        kernel = KernelDraws(language, tuple(dict.fromkeys((dtype, mx.float32))))
        agree = (checks or Checks()).agrees("draws", lambda: _agrees(vocabulary, kernel))
        found = kernel if agree else None
    _prepared[vocabulary] = found


def prepared(vocabulary: int) -> DirectDraws | None:
    """Return what `prepare` has found for this vocabulary; None: operations of MLX draw."""
    return _prepared.get(vocabulary)


@dataclass(frozen=True)
class LibraryDraws:
    """Draws by the native library."""

    library: ModuleType

    def draw(
        self, logits: Any, masks: Any, batch: BatchSampling, positions: Sequence[int]
    ) -> tuple[Any, Any]:
        tokens, valid = self.library.draw(logits, batch.direct, batch.all_keys(positions), masks)
        return tokens, valid


@dataclass(frozen=True)
class KernelDraws:
    """Draws by a kernel, for logits of certain dtypes."""

    language: Language
    dtypes: tuple[mx.Dtype, ...]

    def draw(
        self, logits: Any, masks: Any, batch: BatchSampling, positions: Sequence[int]
    ) -> tuple[Any, Any]:
        if logits.dtype not in self.dtypes:
            logits = logits.astype(mx.float32)
        if masks is not None and 8 * masks.shape[1] < logits.shape[1]:  # the kernel does not check
            raise ValueError("draw takes a bit for each token, [rows, bytes] uint8")
        words = None if masks is None else masks.view(mx.uint32)
        keys = batch.all_keys(positions)
        given = draw_launch(self.language, logits, words, batch.direct, keys)
        tokens, valid = launch.run(given, self.language)
        return tokens, valid


def _agrees(vocabulary: int, kernel: KernelDraws) -> bool:
    """Return whether the kernel is right for each dtype."""
    try:
        wrong = [dtype for dtype in kernel.dtypes if not is_right(kernel, vocabulary, dtype)]
    except Exception as error:  # noqa: BLE001 - the model is served without the kernel
        _log.warning("tokens are drawn without a kernel: %s", repr(error)[:500])
        return False
    if wrong:
        _log.warning("tokens are drawn without a kernel: those for %s differ", wrong)
    return not wrong


def is_right(direct: DirectDraws, vocabulary: int, dtype: mx.Dtype) -> bool:
    """Compare tokens with those of MLX's operations, with and without masks.

    The operations run on the CPU. On CUDA, their modules would stay in memory: 340 MB of the host.
    """
    rows, positions = len(_CHECKED), list(range(len(_CHECKED)))
    batch, plain = BatchSampling.of(_CHECKED, direct=True), BatchSampling.of(_CHECKED)
    right = [[int(vocabulary > 1)] * rows, [0] * rows, [0] * rows]
    for masked in (False, True):
        with mx.stream(mx.cpu):
            noise = mx.random.normal((rows, vocabulary), key=mx.random.key(0))
            logits = (4 * noise).astype(dtype)
            shape = (rows, 4 * -(-vocabulary // 32))
            masks = mx.random.randint(0, 256, shape, key=mx.random.key(1)).astype(mx.uint8)
            allowed = masking.masked(logits, masks) if masked else logits
            wanted = sample(allowed, plain, positions).tolist()
            broken = mx.where(mx.arange(vocabulary) == vocabulary // 2, mx.nan, logits)
            cases = [logits, broken, mx.zeros_like(logits)]
            mx.eval(cases, masks)
        drawn = [direct.draw(one, masks if masked else None, batch, positions) for one in cases]
        if drawn[0][0].tolist() != wanted or [valid.tolist() for _, valid in drawn] != right:
            return False
    return True
