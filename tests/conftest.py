"""Fixtures and order of all tests: a home with a short path, hypothesis without deadlines.

Files run at once on several cores, so the longest come first.
"""

from __future__ import annotations

import gc
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvd.host.home import Home

# A busy machine must not fail a test: what has to be fast is measured where that is the point.
settings.register_profile("kvd", deadline=None)
settings.load_profile("kvd")

# A process started in the background or by nohup ignores these, and so would its children.
for ignored, usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, usual)

TESTS = Path(__file__).parent
LONGEST = (
    "worker/architectures/test_caches.py",
    "worker/cache/test_state_machine.py",
    "worker/architectures/test_zoo.py",
    "acceptance/test_first_light.py",
    "worker/core/test_requests.py",
    "worker/cache/test_frozen.py",
    "worker/core/test_preemption.py",
    "worker/cache/test_peak_memory.py",
    "worker/mlx_lm_drop_in/test_batch_generator.py",
    "worker/kernels/test_decode.py",
    "worker/prefix/test_prefix_hits.py",
    "worker/core/test_mlx_engine.py",
    "worker/attention/test_prefill.py",
    "acceptance/test_chaos.py",
    "test_readme.py",
)
"""Sorted by CPU time. If one of them began last, it would keep one core busy for long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the longest files to the front; the order within a file stays."""
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish() -> None:
    """Leave what libraries and thousands of tests hold out of every collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def home() -> Iterator[Home]:
    """A home that does not exist yet; pytest's own folders are too deep for a Unix socket."""
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    yield Home(root / "h")
    shutil.rmtree(root, ignore_errors=True)
