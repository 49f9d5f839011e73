"""The embedded model ``demo``: a tiny Qwen3 that recalls facts from a long text.

The folder of this package is the model folder: ``mlx_lm.load(kvd.demo.path())`` loads it. It is
meant for tests, benches and a first look, see MODEL_CARD.md. Importing this package loads nothing.
"""

from pathlib import Path

from kvd.demo.recall import RecallTask, digits_right, make_recall_prompt

__all__ = ["RecallTask", "digits_right", "make_recall_prompt", "path"]


def path() -> Path:
    """Return the model folder."""
    return Path(__file__).parent
