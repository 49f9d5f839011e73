"""Which kernels this process tries for decode attention: the environment's ``KVD_ATTENTION``."""

from __future__ import annotations

import os

from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.launch import Fused, find_language

VARIABLE = "KVD_ATTENTION"


def plain_only() -> bool:
    """Return whether only plain operations may run attention: ``reference``."""
    return os.environ.get(VARIABLE) == "reference"


def find_kernels() -> FusedBackend | None:
    language = find_language()
    return None if language is None else FusedBackend(Fused(language), language.most_buffers)
