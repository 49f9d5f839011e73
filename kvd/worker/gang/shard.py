"""Divides an opened model among the ranks of a gang, before its weights are read."""

from __future__ import annotations

from typing import Any

from kvd.worker.text.failures import is_failure, one_line
from protocol.errors import UnsupportedModel

_COUNTS = (
    "n_heads",
    "n_kv_heads",
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "num_k_heads",
    "num_v_heads",
)
"""Names of the numbers of heads in mlx-lm's attention modules."""


def shard(model: Any, architecture: str, group: Any) -> None:
    """Replace the model's layers by this rank's part of them; nothing is evaluated.

    Raises `UnsupportedModel` if the model cannot be divided by the number of ranks.
    """
    ranks = group.size()
    if why := obstacle(model, ranks):
        raise _refusal(architecture, ranks, why)
    try:
        model.shard(group)
    except BaseException as error:  # models raise any type
        if not is_failure(error):
            raise
        raise _refusal(architecture, ranks, one_line(error)) from error


def obstacle(model: Any, ranks: int) -> str:
    """Return why a model cannot be divided among ``ranks``; empty if nothing is known."""
    if not hasattr(model, "shard"):
        return "mlx-lm has no tensor parallel form of this architecture"
    # mlx-lm divides the numbers of heads without a check.
    for path, module in model.named_modules():
        for name in _COUNTS:
            count = getattr(module, name, None)
            if isinstance(count, int) and count % ranks:
                return f"{path}.{name} is {count}, which is no multiple of {ranks}"
    return ""


def _refusal(architecture: str, ranks: int, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"a model of type {architecture!r} cannot be divided among {ranks} ranks: {why};"
        " load it with another number of ranks, or with one",
        model_type=architecture,
    )
