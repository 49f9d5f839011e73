"""Tiny random models of mlx-lm's model files: `ZOO` has those that run here, `NOT_RUNNABLE` others.

There is one file of configurations per family. The models' logits depend on far context
(`weights.py`), which `test_zoo.py` verifies, so a wrong cache cannot pass unnoticed.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

from mlx import nn

from kvd.worker.serving import seam
from tests.breadth import part_of
from tests.worker.architectures.entry import Entry
from tests.worker.architectures.experts import EXPERTS
from tests.worker.architectures.latent import LATENTS
from tests.worker.architectures.plain import PLAIN
from tests.worker.architectures.recurrent import RECURRENT
from tests.worker.architectures.windows import WINDOWS

ZOO: dict[str, Entry] = dict(sorted((PLAIN | EXPERTS | WINDOWS | RECURRENT | LATENTS).items()))

# Models whose layers use the cache like those of other models here, in groups: full attention,
# experts, windows, gated delta rules, convolutions, latents. They differ in what they compute
# before and after attention.
ALIKE = (
    *("olmo2", "apertus", "ernie4_5", "exaone"),
    *("glm4", "glm", "granite", "helium", "internlm2"),
    *("starcoder2", "internlm3", "mimo", "minicpm", "mistral3"),
    *("pixtral", "nemotron", "phi", "phi3", "gptj"),
    *("qwen2_vl", "qwen3_vl", "talkie", "telechat3"),
    *("qwen2_moe", "Klear", "bailing_moe", "deepseek", "dots1"),
    *("solar_open", "ernie4_5_moe", "glm4_moe", "granitemoe", "minimax"),
    *("qwen3_moe", "mixtral", "olmoe", "qwen3_vl_moe", "dbrx"),
    *("exaone4", "afmoe", "muse_glimmer", "olmo3", "spark2_5"),
    *("exaone_moe", "cohere2", "gemma3", "mellum", "ministral3"),
    *("qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35", "lfm2-vl", "lfm2_moe"),
    *("deepseek_v3", "kimi_k25", "kimi_vl", "glm4_moe_lite"),
)
PART = sorted((ZOO.keys() - set(ALIKE)) | set(part_of(ALIKE, 5)))
"""Models with all tests: every fifth of `ALIKE`, and all others. `KVD_TESTS=all` gives all.

The other models are only loaded, which checks their logits.
"""

# Model files that cannot run here, and why.
NOT_RUNNABLE: dict[str, str] = {
    "bitnet": "its linear layers are a Metal kernel: [metal_kernel] No Metal back-end.",
    "muse_spark": "mlx_lm.kernels makes a Metal kernel: [metal_kernel] No Metal back-end.",
    "olmo": "imports hf_olmo, which is not installed, and exits the process without it",
    "phi3small": "adds its boolean mask to the scores instead of masking, so that prefill sees the"
    " future; and writes logits of token ids up to 100351, which a tiny vocabulary lacks",
}


def build(
    name: str, seed: int = 0, config: dict[str, Any] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return model ``name`` with random float32 weights, and its configuration.

    A different ``seed`` gives different weights. ``config`` replaces the zoo's configuration;
    parameters with the same path and shape get the same weights.
    """
    seam.install()
    from tests.worker.architectures.weights import redraw

    entry = ZOO[name]
    config = {"model_type": name} | (config or entry.config)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    # The __post_init__ of some configurations changes them in place.
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    redraw(model, entry.seed + seed, entry.gains)
    model.eval()
    return model, config


def leaves(model: nn.Module) -> list[str]:
    """Return a description of each cache that mlx-lm creates for ``model``, in order."""
    from mlx_lm.models.cache import make_prompt_cache

    return [_describe(cache) for cache in make_prompt_cache(model)]


def _describe(cache: Any) -> str:
    name = type(cache).__name__
    if hasattr(cache, "caches"):
        return f"{name}({', '.join(map(_describe, cache.caches))})"
    for size in ("max_size", "chunk_size", "window_size"):
        if hasattr(cache, size):
            keep = getattr(cache, "keep", 0)
            return f"{name}({size}={getattr(cache, size)}{f', keep={keep}' if keep else ''})"
    if name == "ArraysCache":
        return f"{name}({len(cache.cache)})"
    return name
