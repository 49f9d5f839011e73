"""Settings, fixtures and order of all tests.

Several processes run the test files, so the longest files come first. A file runs in one process,
except `SPREAD`.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

from kvd.host.home import Home

# No test may fail because the machine is busy. The few tests of speed set limits of their own.
settings.register_profile("kvd", deadline=None)
settings.load_profile("kvd")

# A process started in the background or by nohup ignores these signals, and so do its children.
# Tests send the signals to processes that they start.
for ignored, usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, usual)

TESTS = Path(__file__).parent
INSIDE = ("worker", "daemon", "doctor", "fuzz", "tools")
"""Folders of tests that load models in pytest's process.

Results of their checks at load would outlive what a test replaces. The workers of other tests keep
results, as a user's do: without them, a load of the embedded model takes 1.0 s of CPU time instead
of 0.1.
"""
LONGEST = (
    "worker/architectures/test_caches.py",
    "process/test_gangs.py",
    "worker/cache/test_segment_records.py",
    "bench/test_gpu_all.py",
    "worker/serving/test_bit_probe.py",
    "worker/attention/test_starts.py",
    "worker/gang/test_kernels.py",
    "http/test_kills.py",
    "worker/cache/test_state_machine.py",
    "acceptance/test_chaos.py",
    "acceptance/test_gang.py",
    "process/test_workers.py",
    "acceptance/test_prefix_faults.py",
    "worker/core/test_packed_prefill.py",
    "sim/test_daemon_day.py",
    "scale/test_nginx.py",
    "worker/kernels/test_decode.py",
    "acceptance/test_first_light.py",
    "worker/cache/test_snapshot.py",
    "worker/mlx_lm_drop_in/test_batch_generator.py",
    "worker/tools/test_calibrate.py",
    "page/test_page.py",
    "worker/cache/test_peak_memory.py",
    "process/test_start_and_stop.py",
    "process/test_kvctl.py",
    "worker/grammar/test_requests.py",
    "bench/test_jit.py",
    "worker/grammar/test_accelerator_steps.py",
    "worker/attention/test_prefill.py",
    "sim/test_week.py",
    "worker/mlx_lm_drop_in/test_state_machine.py",
    "service/test_systemd.py",
    "worker/tools/test_fidelity.py",
    "worker/gang/test_gang_ends.py",
    "worker/gang/test_architectures.py",
    "fuzz/test_fuzz.py",
    "worker/gang/test_ring.py",
    "bench/test_ssd.py",
    "acceptance/test_encrypted_prefixes.py",
    "worker/core/test_segment_store.py",
    "worker/prefix/test_prefix_hits.py",
    "worker/serving/test_probe.py",
    "test_readme.py",
    "worker/cache/test_step_down.py",
    "metrics/test_export.py",
    "worker/core/test_mlx_engine.py",
    "service/test_commands.py",
    "worker/gang/test_campaign.py",
    "http/test_launched_agents.py",
    "worker/cache/test_pages.py",
    "worker/grammar/test_late_rows.py",
    "worker/core/test_fused.py",
    "test_packaging.py",
    "doctor/test_selftest.py",
    "worker/core/test_requests.py",
    "worker/architectures/test_zoo.py",
    "worker/core/test_step_down.py",
    "worker/cache/test_snapshot_records.py",
    "process/test_kvctl_tools.py",
    "worker/process/test_memory_limit.py",
    "worker/core/test_segment_families.py",
    "http/test_launch.py",
    "worker/core/test_preemption.py",
    "worker/gang/test_divided_layers.py",
    "bench/test_soak.py",
    "test_docker.py",
    "acceptance/test_prefixes_at_unload.py",
    "acceptance/test_idle_memory.py",
)
"""Test files that take 9 s of CPU time, or that wait as long, about the longest first.

One that began last would delay the end of the run. The other files take up to 9 s each.
"""

SPREAD = "tests/sim/test_daemon_day.py::"
"""Tests of this file share nothing, so they run in any process. One alone took 30 s of CPU time."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return Files(config, log) if config.getoption("dist") == "loadfile" else None


class Files(LoadFileScheduling):
    """Distributes whole files, except `SPREAD`."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SPREAD) else super()._split_scope(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collections, which took a sixth to a third of its CPU time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the longest files to the front; the order within a file stays.

    Files that start processes and wait for them are spread among those that compute: otherwise
    several would wait at once. Files without MLX are the shortest and come last.
    """
    marks: dict[Path, set[str]] = {}
    for item in items:
        marks.setdefault(item.path, set()).update(mark.name for mark in item.iter_markers())
    ranks: dict[Path, float] = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    others = [path for path in marks if path not in ranks]
    waiting = [path for path in others if "process" in marks[path]]
    computing = [path for path in others if "process" not in marks[path]]
    computing.sort(key=lambda path: "mlx" not in marks[path])
    for paths, end in ((waiting, 0.9), (computing, 1.0)):
        for index, path in enumerate(paths):
            ranks[path] = len(LONGEST) + end * index / len(paths)
    items.sort(key=lambda item: ranks[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.relative_to(TESTS).parts[0] in INSIDE:
        os.environ["KVD_CHECKS"] = "off"
    else:
        os.environ.pop("KVD_CHECKS", None)


def pytest_collection_finish() -> None:
    """Exclude the objects of libraries and of thousands of tests from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def home() -> Iterator[Home]:
    """A home that does not exist yet; pytest's own folders are too deep for a Unix socket."""
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    yield Home(root / "h")
    shutil.rmtree(root, ignore_errors=True)
