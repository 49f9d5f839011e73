"""Whether a model gives embeddings, and how it pools its hidden states.

A model that was trained for embeddings has the files of sentence-transformers, or its name says
so: conversions for MLX often lack these files. The hidden states of other models are vectors
too, but texts of like meaning need not be near each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from protocol.embedding import EmbeddingInfo, EmbeddingsMode, Pooling
from protocol.errors import InvalidRequest

_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
"""Modules of sentence-transformers that are computed here; all vectors are normalized."""
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last_token",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_MAX_BYTES = 1 << 20
"""Limit for each of the files; they have some hundred bytes."""


@dataclass(frozen=True)
class EmbeddingRules:
    """How a model's embeddings are computed, or why it gives none."""

    info: EmbeddingInfo | None
    refusal: str = ""
    end: tuple[int, ...] = ()
    """Tokens that must end a text."""

    def check(self) -> EmbeddingInfo:
        """Raise `InvalidRequest` with the reason if the model gives no embeddings."""
        if self.info is None:
            raise InvalidRequest(self.refusal, field="model")
        return self.info


def find_rules(
    folder: Path,
    config: dict[str, Any],
    source: str,
    mode: EmbeddingsMode,
    *,
    splits_head: bool,
    appended: Sequence[int],
) -> EmbeddingRules:
    """Return the rules of a model.

    ``splits_head``: whether its hidden states can be computed. ``appended``: tokens that the
    tokenizer appends to a text. Without any, a model that pools the last token gets its end token.
    """
    name = source.rpartition("/")[2].lower()
    try:
        pooling = _pooling(folder)
        if _is_bidirectional(config):
            return EmbeddingRules(
                None,
                "the model attends to later tokens too, which mlx-lm does not compute; use an"
                " embedding model with causal attention, such as Qwen3-Embedding",
            )
    except (ValueError, OSError) as error:
        return EmbeddingRules(None, str(error))
    if pooling is None and ("embed" in name or mode == "any"):
        pooling = "last_token"
    if pooling is None:
        return EmbeddingRules(
            None,
            "the model was not trained for embeddings: it has no 1_Pooling/config.json; use an"
            ' embedding model such as Qwen3-Embedding, or set embeddings = "any" in config.toml',
        )
    dimensions = _setting(config, "hidden_size")
    if not splits_head or not isinstance(dimensions, int):
        return EmbeddingRules(
            None, "the hidden states of a model of this class are not accessible; use another model"
        )
    end = tuple(appended)
    if not end and pooling == "last_token":
        eos = config.get("eos_token_id")
        ids = eos if isinstance(eos, list) else [eos]
        end = tuple(token for token in ids[:1] if isinstance(token, int))
    return EmbeddingRules(EmbeddingInfo(pooling=pooling, dimensions=dimensions), end=end)


def _pooling(folder: Path) -> Pooling | None:
    """Return the pooling that the folder's files name; None without files.

    Raises ``ValueError`` with the reason if it is not supported.
    """
    modules = _read(folder / "modules.json", list[dict[str, Any]])
    for module in modules or []:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _MODULES:
            raise ValueError(f"the model needs the module {kind!r}, which kvd does not compute")
    paths = [str(one.get("path", "")) for one in modules or [] if _is_pooling(one)]
    place = Path(paths[0] if paths else "1_Pooling")
    if place.is_absolute() or ".." in place.parts:
        raise ValueError(f"modules.json names {place}, which is outside the model's folder")
    config = _read(folder / place / "config.json", dict[str, Any])
    if config is None:
        return "last_token" if modules else None
    modes = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(
            f"the model's pooling is {' and '.join(modes) or 'unknown'}; kvd computes one of"
            f" {', '.join(_POOLINGS)}"
        )
    return _POOLINGS[modes[0]]


def _is_pooling(module: dict[str, Any]) -> bool:
    return str(module.get("type", "")).endswith(".Pooling")


def _read(path: Path, kind: Any) -> Any:
    """Return the contents of a JSON file, None if there is none; raises ``ValueError``."""
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path.name} has more than {_MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def _is_bidirectional(config: dict[str, Any]) -> bool:
    return bool(_setting(config, "use_bidirectional_attention")) or config.get("is_causal") is False


def _setting(config: dict[str, Any], key: str) -> Any:
    return config.get(key) or (config.get("text_config") or {}).get(key)
