"""The tokens that end a text whose embedding is computed."""

from __future__ import annotations

from typing import Any

from kvd.worker.text.failures import is_failure


def end_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer appends to a text; often none."""
    try:
        full = list(tokenizer.encode("a"))
        plain = list(tokenizer.encode("a", add_special_tokens=False))
    except BaseException as error:  # tokenizers raise any type
        if not is_failure(error):
            raise
        return []
    for at in range(len(full) - len(plain) + 1):
        if plain and full[at : at + len(plain)] == plain:
            return full[at + len(plain) :]
    return []
