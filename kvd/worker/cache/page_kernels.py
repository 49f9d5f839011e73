"""What CUDA kernels that copy pages share: the shapes of pages, and how a kernel is compiled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from kvd.worker.artifacts import modules
from kvd.worker.artifacts.cuda_text import Argument, KernelText

WORD_BYTES = 16
"""Bytes that a thread copies at once."""


@dataclass(frozen=True)
class PageShape:
    """What a kernel depends on: the bytes of one page in each array, and the arrays' dtypes."""

    sizes: tuple[int, ...]
    dtypes: tuple[mx.Dtype, ...]

    @staticmethod
    def of(arrays: Sequence[mx.array]) -> PageShape:
        sizes = [math.prod(array.shape[1:]) * array.dtype.size for array in arrays]
        dtypes = (array.dtype for array, size in zip(arrays, sizes, strict=True) if size)
        return PageShape(tuple(filter(None, sizes)), tuple(dtypes))

    @property
    def fits(self) -> bool:
        """Whether a kernel can copy such pages."""
        return bool(self.sizes) and not any(size % WORD_BYTES for size in self.sizes)


@lru_cache(8)
def slots_array(slots: tuple[int | None, ...]) -> mx.array:
    """Return slots as int32, with -1 for None."""
    found = mx.array([-1 if slot is None else slot for slot in slots], mx.int32)
    mx.eval(found)
    return found


def text_of(
    part: str,
    source: str,
    shape: PageShape,
    inputs: Sequence[Argument],
    outputs: Sequence[Argument],
) -> KernelText:
    """Return the texts of a kernel with this body."""
    # MLX finds a compiled kernel by its name, so the name covers all that it depends on.
    about = hashlib.sha256(f"{source}{shape.dtypes}".encode()).hexdigest()[:16]
    return KernelText(
        name=f"kvd_{part}_{about}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        template=(),
        source=source,
        header="",
        mlx_source=source,
        mlx_header="",
    )


def kernel_of(text: KernelText) -> Any:
    """Return MLX's kernel, compiled by kvd if modules are kept."""
    if (kept := modules.current()) is not None:
        kept.provide(text)
    return mx.fast.cuda_kernel(
        name=text.name,
        input_names=[one.name for one in text.inputs],
        output_names=[one.name for one in text.outputs],
        source=text.mlx_source,
        ensure_row_contiguous=False,  # else a kernel could write into a copy of its input
    )
