"""The CPU time of one call: what counts, and that a limit never ends anything else."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from kvd.worker.process.cpu_limit import limit_cpu


def compute_forever():
    while True:
        try:
            for _ in range(1000):
                pass
        except Exception:  # noqa: BLE001 - code that handles every error
            pass


def test_a_call_that_computes_for_too_long_is_ended():
    start = time.thread_time()
    with pytest.raises(TimeoutError, match=r"more than 0\.05 s of CPU time"):
        limit_cpu(0.05, compute_forever)
    assert 0.05 <= time.thread_time() - start < 1.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class Finalized:
    """Computes for 0.1 s in its finalizer, in which Python drops exceptions."""

    def __del__(self):
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_call_is_ended_although_a_finalizer_dropped_the_first_attempt():
    def compute():
        Finalized()
        end = time.thread_time() + 5.0
        while time.thread_time() < end:
            pass

    with pytest.raises(TimeoutError):
        limit_cpu(0.05, compute)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_time_without_a_processor_does_not_count():
    def wait():
        threading.Event().wait(0.15)
        return "waited"

    assert limit_cpu(0.05, wait) == "waited"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_errors_and_results_of_a_call_within_its_time_are_its_own():
    def fail():
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        limit_cpu(60.0, fail)
    assert limit_cpu(60.0, lambda: 3) == 3
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_signal_that_comes_late_ends_nothing():
    limit_cpu(60.0, lambda: None)
    signal.raise_signal(signal.SIGALRM)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_outside_the_main_thread_calls_are_not_limited():
    results = []
    thread = threading.Thread(target=lambda: results.append(limit_cpu(0.0, lambda: "done")))
    thread.start()
    thread.join()
    assert results == ["done"]
