"""A model folder with three of the embedded model's six layers, for tests that compare outputs.

It has the embedded model's tokenizer and shapes, and takes half the time. It recalls nothing, but
its logits depend as much on far context: with other tokens 50 to 250 positions before, their KL
divergence is 0.43, and 0.38 in the embedded model. Two changes make its answers as varied:

* Its head is separate, and its rows are shuffled. With the embeddings as head, it repeats a token.
* The scale of the last norm is reduced, because three layers cause extreme logits.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx

from kvd import demo

LAYERS = (0, 4, 5)
NORM_SCALE = 0.7
FIRST_WORD = 300
"""The first token id whose row of the head is shuffled. Special tokens come before."""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Write the folder, which is deleted when the process ends."""
    kept = tempfile.TemporaryDirectory(prefix="kvd-shallow-")
    full, folder = demo.path(), Path(kept.name)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(full / name, folder)
    config = json.loads((full / "config.json").read_text())
    config |= {"num_hidden_layers": len(LAYERS), "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(full / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), _cut(weights), {"format": "mlx"})
    return kept


def _cut(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    found = {name: array for name, array in weights.items() if ".layers." not in name}
    for number, layer in enumerate(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in (name for name in weights if name.startswith(prefix)):
            found[f"model.layers.{number}.{name.removeprefix(prefix)}"] = weights[name]
    rows = list(range(FIRST_WORD, weights["model.embed_tokens.weight"].shape[0]))
    random.Random(1).shuffle(rows)
    found["lm_head.weight"] = weights["model.embed_tokens.weight"][
        mx.array([*range(FIRST_WORD), *rows])
    ]
    found["model.norm.weight"] = NORM_SCALE * weights["model.norm.weight"]
    return found


def path() -> str:
    return _folder().name
