"""Settings of the Python interpreter in processes that run an engine."""

from __future__ import annotations

import os
import sys

SWITCH_INTERVAL_S = 0.0005
"""Seconds after which a thread releases Python's lock if another waits (Python's default: 5 ms).
The thread that computes takes the lock many times in a step, also from threads that write or
compile grammars."""

LAUNCHES = {"MLX_USE_CUDA_GRAPHS": "0"}
"""How MLX launches kernels on CUDA, as variables of the environment: one by one.

By default it collects them in graphs, and updates these for each use. On an H200, prefill and
decode steps took 0.68 to 0.85 of the time without graphs, with up to 16 GiB of freed buffers. With
128 MiB, they took 0.87 to 1.09 of it."""


def launch_directly() -> None:
    """Set `LAUNCHES`, unless the environment has them; call it before MLX computes."""
    for name, value in LAUNCHES.items():
        os.environ.setdefault(name, value)


def prepare() -> None:
    """Set up this process; call it before mlx-lm is imported."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The Hub's client for xet buffers gigabytes, which are not part of any grant.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    launch_directly()
    # transformers imports these if they are installed: hundreds of megabytes, above the limit of a
    # worker without a grant, and seconds of each load. No model here needs them.
    sys.modules |= dict.fromkeys(("torch", "tensorflow", "jax", "flax"))  # type: ignore[arg-type]
