"""Attention variants that a runner is measured with: the one chosen at load, fused, reference."""

from __future__ import annotations

from bench.retrace import retrace
from kvd.worker.cache.backend import Backend
from kvd.worker.serving.kernel_choice import find_kernels
from kvd.worker.serving.runner import Runner

CHOSEN, FUSED, REFERENCE = "chosen", "fused", "reference"


def here() -> list[str]:
    """Return the attention variants that are compared on this device."""
    return [CHOSEN] if find_kernels() is None else [FUSED, REFERENCE]


class Attentions:
    """Changes a runner's attention, which is allowed while its cache has no step in progress."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        store = runner.cache.stores[0]
        self._product = store.page_product
        self._chosen: Backend | None = store.backend

    def use(self, name: str) -> None:
        """Change the attention, and make compiled steps be traced again."""
        self._runner.cache.use(self._product, self._backend(name))
        retrace(self._runner)

    def _backend(self, name: str) -> Backend | None:
        if name == CHOSEN:
            return self._chosen
        if name == REFERENCE:
            return None
        fused = find_kernels()
        if fused is None:
            raise ValueError("there are no fused kernels for this device")
        return fused
