"""Imports of a worker that leave out what its model does not need.

`install` imports mlx-lm's models and loader without the libraries that only its other parts need.

``import mlx_lm`` imports transformers, the Hub's client and NumPy: 38 MB and 0.8 s of CPU time in
each worker. Two modules cause it, and neither is needed to build a model:

* The package itself imports the generation and conversion programs. `install` registers the
  package without running its code, so that submodules are found as usual.
* ``mlx_lm.utils`` imports ``mlx_lm.tokenizer_utils`` and ``huggingface_hub`` for one function each.
  `install` replaces both modules while ``mlx_lm.utils`` is imported. The functions that
  ``mlx_lm.utils`` keeps import the real modules when they are called.

Afterwards, every other import finds the real modules.

`np` is NumPy, imported at its first use: it takes 13 MB, and only grammars, stored prefixes,
rectangles, GPUs and the probe of layers use it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["has_transformers", "install", "np"]


def install() -> None:
    """Prepare this process; without effect if mlx-lm is imported already.

    Imports MLX. Raises ``ImportError`` if mlx-lm is missing or was changed.
    """
    if "mlx_lm" in sys.modules:
        return
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None:
        raise ModuleNotFoundError("No module named 'mlx_lm'", name="mlx_lm")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as mlx-lm does
    sys.modules["mlx_lm"] = importlib.util.module_from_spec(spec)
    hub = ModuleType("huggingface_hub")
    tokenizers = ModuleType("mlx_lm.tokenizer_utils")
    vars(hub)["snapshot_download"] = _snapshot_download
    vars(tokenizers).update(load=_load_tokenizer, TokenizerWrapper=object)
    with _replaced(hub, tokenizers):
        importlib.import_module("mlx_lm.utils")


def has_transformers() -> bool:
    return "transformers" in sys.modules


@contextlib.contextmanager
def _replaced(*modules: ModuleType) -> Iterator[None]:
    """Register modules under their names; remove them again, and restore earlier ones."""
    before = {module.__name__: sys.modules.get(module.__name__) for module in modules}
    sys.modules.update({module.__name__: module for module in modules})
    try:
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = earlier


def _load_tokenizer(*arguments: Any, **named: Any) -> Any:
    return importlib.import_module("mlx_lm.tokenizer_utils").load(*arguments, **named)


def _snapshot_download(*arguments: Any, **named: Any) -> Any:
    return importlib.import_module("huggingface_hub").snapshot_download(*arguments, **named)


class _NumPy:
    """NumPy's attributes, each kept after its first use."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module("numpy"), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import numpy as np
else:
    np = _NumPy()
