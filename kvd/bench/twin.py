"""Makes a model folder without an end-of-text token.

Every server that loads it generates exactly the requested number of tokens, without options that
cost time in a sampler (``logit_bias``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ENDS = ("eos_token_id", "eos_token")
_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")


def make(source: Path, target: Path, convert: Callable[[Path, Path], None] | None = None) -> None:
    """Create folder ``target`` from the model in ``source``; unchanged files become links.

    ``convert`` writes the first file's weights to the second; without it, weights are links too.
    """
    target.mkdir()
    for file in sorted(source.iterdir()):
        copy = target / file.name
        if file.name in _CONFIGS:
            copy.write_text(json.dumps(endless(json.loads(file.read_text()), file.name)))
        elif convert is not None and file.suffix == ".safetensors":
            convert(file, copy)
        elif file.is_file():
            copy.symlink_to(file.resolve())


def endless(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration without the tokens that end a completion."""
    kept = {key: value for key, value in config.items() if key not in _ENDS}
    # Without the key, the tokenizer's class would use its default token.
    return {**kept, "eos_token": None} if name == "tokenizer_config.json" else kept
