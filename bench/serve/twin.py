"""Makes the model folder that all servers load, changed so that no server has an advantage.

* There is no end-of-text token. So every server generates exactly the requested number of tokens,
  without options that cost time in a sampler (``logit_bias``).
* On a machine that computes on the CPU, weights are float32, because MLX emulates half precision
  there, many times slower. kvd would convert at load and mlx_lm.server would not, but conversion is
  not what is compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ENDS = ("eos_token_id", "eos_token")
_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")


def make(source: Path, target: Path, *, float32: bool) -> None:
    """Create folder ``target`` from the model in ``source``; unchanged files become links."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        copy = target / file.name
        if file.name in _CONFIGS:
            copy.write_text(json.dumps(endless(json.loads(file.read_text()), file.name)))
        elif float32 and file.suffix == ".safetensors":
            _convert(file, copy)
        elif file.is_file():
            copy.symlink_to(file.resolve())


def endless(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration without the tokens that end a completion."""
    kept = {key: value for key, value in config.items() if key not in _ENDS}
    # Without the key, the tokenizer's class would use its default token.
    return {**kept, "eos_token": None} if name == "tokenizer_config.json" else kept


def _convert(file: Path, copy: Path) -> None:
    import mlx.core as mx

    weights: Any = mx.load(str(file), stream=mx.cpu)
    converted = {
        name: array.astype(mx.float32, stream=mx.cpu)
        if mx.issubdtype(array.dtype, mx.floating)
        else array
        for name, array in weights.items()
    }
    mx.save_safetensors(str(copy), converted)
