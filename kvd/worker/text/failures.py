"""Which errors mean that a library failed on the files or texts that it got."""

from __future__ import annotations

_MAX_CHARS = 300


def is_failure(error: BaseException) -> bool:
    """Return whether an error is a library's failure rather than an interruption.

    Panics of libraries in Rust, such as tokenizers, derive from `BaseException`.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(error: BaseException) -> str:
    """Return a short error text: loaders list all tensors of a model, one in each line."""
    text = " ".join(str(error).split())
    shortened = text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
    return f"{type(error).__name__}: {shortened}"
