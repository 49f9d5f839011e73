"""Settings, fixtures and order of all tests.

Several processes run the test files, each of which runs in one, so the longest files come first.
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
    "worker/core/test_idle.py",
    "worker/gpu/test_prefill_blocks.py",
    "process/test_gangs.py",
    "http/test_kills.py",
    "acceptance/test_prefix_faults.py",
    "page/test_page.py",
    "worker/kernels/test_decode.py",
    "acceptance/test_chaos.py",
    "worker/kernels/test_prefill.py",
    "worker/architectures/test_zoo.py",
    "worker/cache/test_segment_records.py",
    "bench/test_gpu_all.py",
    "worker/attention/test_prefill.py",
    "worker/core/test_packed_prefill.py",
    "acceptance/test_first_light.py",
    "worker/serving/test_bit_probe.py",
    "worker/cache/test_state_machine.py",
    "worker/tools/test_calibrate.py",
    "worker/mlx_lm_drop_in/test_batch_generator.py",
    "worker/cache/test_peak_memory.py",
    "scale/test_nginx.py",
    "worker/core/test_segment_store.py",
    "worker/cache/test_snapshot.py",
    "worker/gang/test_architectures.py",
    "process/test_kvctl.py",
    "worker/mlx_lm_drop_in/test_state_machine.py",
    "worker/gang/test_gang_ends.py",
    "worker/core/test_requests.py",
    "worker/prefix/test_prefix_hits.py",
    "worker/core/test_mlx_engine.py",
    "worker/cache/test_step_down.py",
    "worker/attention/test_windows.py",
    "bench/test_jit.py",
    "process/test_start_and_stop.py",
    "test_readme.py",
    "worker/core/test_step_down.py",
    "sim/test_week.py",
    "bench/test_ssd.py",
    "worker/core/test_fused.py",
    "worker/tools/test_fidelity.py",
    "worker/kernels/test_modules.py",
    "acceptance/test_prefixes_at_unload.py",
    "worker/kernels/test_draw.py",
    "worker/gang/test_kernels.py",
    "worker/core/test_preemption.py",
    "worker/gang/test_campaign.py",
    "worker/core/test_interleaving.py",
    "worker/cache/test_store.py",
    "acceptance/test_explain.py",
    "process/test_workers.py",
    "test_packaging.py",
    "worker/serving/test_probe.py",
    "worker/attention/test_packed.py",
    "worker/cache/test_snapshot_records.py",
    "acceptance/test_gang.py",
    "sim/test_daemon_day.py",
    "worker/serving/test_compiled.py",
    "worker/mlx_lm_drop_in/test_conversions.py",
    "worker/grammar/test_late_rows.py",
    "worker/grammar/test_requests.py",
    "worker/text/test_fast_tokenizer.py",
    "worker/serving/test_check_key.py",
    "worker/test_lean_imports.py",
    "worker/core/test_faults.py",
    "worker/core/test_segment_families.py",
    "service/test_systemd.py",
    "doctor/test_selftest.py",
    "acceptance/test_pressure.py",
    "worker/serving/test_bit_choice.py",
    "worker/serving/test_kernel_plan.py",
    "worker/core/test_embeddings.py",
    "worker/native/test_portable.py",
    "worker/text/test_real_tokenizers.py",
    "worker/serving/test_kernel_check.py",
    "process/test_kvctl_tools.py",
    "worker/tools/test_bench_kv.py",
    "worker/process/test_memory_limit.py",
    "worker/cache/test_shared_pages_of_choices.py",
    "bench/test_memory_limits.py",
    "test_docker.py",
    "worker/core/faulty_disk/test_faults.py",
    "worker/gang/test_divided_layers.py",
    "worker/native/test_whole_layers.py",
    "bench/test_kv.py",
)
"""Test files that take 9 s of CPU time, or that wait as long, about the longest first.

One that began last would delay the end of the run. The other files take up to 9 s each.
"""


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
