"""Attention kernels serve a model only if they are right at every precision level, and faster than
plain operations. Otherwise the reason is logged."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace as restruct

from kvd.worker.artifacts.checks import Checks
from kvd.worker.artifacts.entries import Entries
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.arguments import Attention
from kvd.worker.cache import store
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import (
    check_cases,
    kernel_check,
    kernel_choice,
    kernel_timing,
    loading,
    probe,
    runner,
    selfcheck,
    timed_kernels,
)
from kvd.worker.serving.kernel_timing import Times
from kvd.worker.serving.probe import Served
from protocol.types import FusedAttention
from tests.worker import shallow
from tests.worker.attention.stand_in import StandIn
from tests.worker.core.driver import Driver
from tests.worker.serving.test_probe import VOCAB, model_of

pytestmark = pytest.mark.mlx
SCHEMES = (Scheme(8, 8), Scheme(8, 4), Scheme(4, 4))


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Kernels are twice as fast as plain operations, unless a test changes the times."""
    times = Times(fused_s=1e-3, reference_s=2e-3, keys=64)
    monkeypatch.setattr(kernel_timing, "compare", lambda *_: times)
    return times


def served(
    kernels: StandIn,
    kind: str = "qwen3",
    schemes: tuple[Scheme, ...] = SCHEMES[::2],
    **settings: Any,
) -> Served:
    backend = kernels.backend()
    window = {"sliding_window": 64, "sliding_window_pattern": 2}
    model = model_of(kind, **(window if kind == "gemma3_text" else {"num_hidden_layers": 1}))
    return probe.serve(model, CacheSettings(schemes, **settings), VOCAB, kernels=backend)


def assert_unused(found: Served, reason: str, cause: str = "results") -> None:
    assert found.fused is not None
    assert (found.fused.used, found.fused.cause) == (False, cause)
    assert reason in str(found.fused.reason)
    assert reason in kernel_check.describe_verdict(found.fused)
    assert found.path == "reference, gathered pages"
    assert all(one.backend is None for one in found.runner.cache.stores)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_right_and_faster_kernels_are_used(kind: str) -> None:
    kernels = StandIn()
    found = served(kernels, kind)

    assert found.path == "fused"
    assert 0 <= found.error < 1e-4
    assert kernels.attended > 0
    assert kernels.launches == 0  # launches of the check are not counted
    assert found.fused is not None
    assert found.fused.used
    assert found.fused.reason is None
    assert (found.fused.call_ms, found.fused.reference_ms) == (1.0, 2.0)
    assert found.fused.compile_s >= 0
    for each in found.runner.cache.stores:
        assert isinstance(each.backend, FusedBackend)
        assert each.backend.kernels is kernels
    text = kernel_check.describe_verdict(found.fused)
    assert "1.000 ms per layer, plain operations 2.000 ms" in text


def test_kernels_that_passed_are_used_again_without_a_check(tmp_path: Path) -> None:
    stored = Entries(tmp_path / "kvd" / "checks", 10_000)
    verdicts, attended = [], []
    for _ in range(2):
        kernels, checks = StandIn(), Checks(stored, "key")
        found = probe.serve(
            model_of("qwen3", num_hidden_layers=1), CacheSettings(SCHEMES), VOCAB,
            kernels=kernels.backend(), checks=checks,
        )  # fmt: skip
        checks.keep()
        assert found.path == "fused"
        assert found.fused is not None
        verdicts.append(found.fused)
        attended.append(kernels.attended)
    assert attended[0] > 0 == attended[1]
    assert verdicts[1] == restruct(verdicts[0], compile_s=0.0)


def test_slower_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch, timed: Times) -> None:
    monkeypatch.setattr(kernel_timing, "compare", lambda *_: replace(timed, fused_s=2e-3))
    assert_unused(served(StandIn()), "slower than plain operations", "speed")


def test_wrong_kernels_are_not_used() -> None:
    assert_unused(served(StandIn(error=0.3)), "off by")


class Picky(StandIn):
    """Kernels that are wrong, or fail, in steps that a test selects by their levels."""

    def __init__(self, is_picked: Any, failure: Exception | None = None) -> None:
        super().__init__()
        self.is_picked = is_picked
        self.failure = failure

    def decode_attention(self, given: Attention) -> mx.array:
        picked = self.is_picked(given.key_packings, given.value_packings)
        if picked and self.failure is not None:
            raise self.failure
        found = super().decode_attention(given)
        return found * 0.5 if picked else found


@pytest.mark.parametrize(
    "is_picked",
    [
        lambda keys, values: not keys,
        lambda keys, values: len(keys) == 1 and (keys[0][0], values[0][0]) == (8, 4),
        lambda keys, values: len(keys) == 1 and keys[0][0] == 4,
        lambda keys, values: len(keys) == len(SCHEMES),
    ],
    ids=["no pages", "a level in the middle", "the lowest level", "mixed levels"],
)
def test_kernels_that_are_wrong_for_some_levels_only_are_not_used(is_picked: Any) -> None:
    assert_unused(served(Picky(is_picked), schemes=SCHEMES), "off by")


def test_kernels_that_do_not_compile_are_not_used() -> None:
    failure = RuntimeError("error: use of undeclared identifier\nand the rest of the log")
    found = served(Picky(lambda keys, values: True, failure))

    assert_unused(found, "RuntimeError: error: use of undeclared identifier", "error")
    assert "the rest" not in str(found.fused)


def test_kernels_that_fail_when_they_are_timed_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any) -> Times:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(kernel_timing, "compare", failing)
    reason = "the kernels fail on longer rows: RuntimeError: an illegal memory"
    assert_unused(served(StandIn()), reason, "error")


def test_lack_of_memory_is_no_verdict_on_kernels() -> None:
    with pytest.raises(MemoryError):
        served(Picky(lambda keys, values: True, MemoryError()))


class Silent(StandIn):
    """Returns right numbers, but counts no launch of a kernel."""

    def decode_attention(self, given: Attention) -> mx.array:
        found = super().decode_attention(given)
        self.launches = 0
        return found


def test_right_numbers_without_a_launch_are_not_trusted() -> None:
    assert_unused(served(Silent()), "no kernel was launched")


def test_unsupported_head_sizes_use_plain_operations() -> None:
    kernels = StandIn()
    model = model_of("llama", head_dim=60)
    found = probe.serve(model, CacheSettings(SCHEMES), VOCAB, kernels=kernels.backend())

    assert_unused(found, "no kernels for keys of size 60 and values of size 60", "model")
    assert kernels.launches == 0


def test_a_dense_start_and_bounded_rows_are_checked_too() -> None:
    found = served(StandIn(), quantized_start=512, max_size=2048, keep=1000)

    assert found.path == "fused"
    assert found.runner.cache.settings.keep == 1000


def test_a_model_that_is_not_served_over_pages_has_no_verdict() -> None:
    found = served(StandIn(), "gemma2")

    assert found.fused is None
    assert found.path == "dequantize on read"


def test_kernels_and_plain_operations_are_timed_on_steps_of_the_models_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(kernel_timing, "KEYS", 256)
    seen: list[tuple[Any, ...]] = []

    class Noting(StandIn):
        def decode_attention(self, given: Attention) -> mx.array:
            lists = given.pages, given.tail_keys, given.splits
            seen.append((given.queries.shape, *(one.shape[0] for one in lists)))
            return super().decode_attention(given)

    found = served(Noting())
    assert isinstance(found.fused, FusedAttention)
    assert found.fused.rows == kernel_timing.ROWS
    assert found.fused.keys == 256
    assert found.fused.call_ms is not None
    assert found.fused.call_ms > 0
    assert found.fused.reference_ms is not None
    assert found.fused.reference_ms > 0
    assert found.runner.cache.nbytes == 0
    # Each row has four pages and a tail, in two splits.
    timed = [
        (kernel_timing.ROWS, 4, 1, 64),
        kernel_timing.ROWS * 4,
        kernel_timing.ROWS,
        kernel_timing.ROWS * 2,
    ]
    assert seen[-kernel_timing.CALLS * (kernel_timing.REPEATS + 1) :] == [
        tuple(timed) for _ in range(kernel_timing.CALLS * (kernel_timing.REPEATS + 1))
    ]


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(kernel_timing, "KEYS", 128)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_plain_operations_do_not_run_if_kernels_are_about_as_fast_as_dense_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> mx.array:
        raise AssertionError("a plain operation ran")

    monkeypatch.setattr(kernel_timing, "DENSE_LIMIT", 1e9)  # replacements of kernels are slow
    monkeypatch.setattr(store, "page_product", fail)
    monkeypatch.setattr(probe, "page_product", fail)
    monkeypatch.setattr(check_cases, "page_product", fail)
    found = served(StandIn())

    assert found.path == "fused"
    assert found.fused is not None
    assert found.fused.call_ms is not None
    assert found.fused.call_ms > 0
    assert found.fused.reference_ms is None
    text = kernel_check.describe_verdict(found.fused)
    assert f"{found.fused.call_ms:.3f} ms per layer (4 rows of 128 keys)" in text


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_other_kernels_are_compared_with_plain_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_timing, "DENSE_LIMIT", 0.0)
    found = served(StandIn())

    assert found.fused is not None
    assert found.fused.reference_ms is not None
    assert found.fused.reference_ms > 0


def test_checks_of_several_processes_use_right_kernels_whatever_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Shared(Checks):
        times_plain = False

        def under(self, name: str) -> Shared:
            return self

    monkeypatch.undo()
    monkeypatch.setattr(kernel_timing, "KEYS", 128)
    model = model_of("qwen3", num_hidden_layers=1)
    settings, kernels = CacheSettings(SCHEMES[:1]), StandIn().backend()
    found = probe.serve(model, settings, VOCAB, kernels=kernels, checks=Shared())

    assert found.fused is not None
    assert found.fused.used
    assert found.fused.call_ms is not None
    assert found.fused.reference_ms is None


@pytest.mark.parametrize("buffers", [31, 24])
def test_plain_operations_are_checked_if_kernels_cannot_read_all_levels(
    monkeypatch: pytest.MonkeyPatch, buffers: int
) -> None:
    backends = []
    run = selfcheck._run

    def note(runner: Any, vocab: int, given: Any, reference: Any, *, mixed: bool) -> Any:
        backends.append(runner.cache.backend)
        return run(runner, vocab, given, reference, mixed=mixed)

    monkeypatch.setattr(selfcheck, "_run", note)
    backend = replace(StandIn().backend(), most_buffers=buffers)
    model = model_of("qwen3", num_hidden_layers=1)
    found = probe.serve(model, CacheSettings(SCHEMES), VOCAB, kernels=backend)

    assert found.path == "fused"
    assert found.runner.cache.backend is backend
    assert (None in backends) == (buffers < 7 + 6 * len(SCHEMES))


def test_timing_stays_within_the_scratch() -> None:
    found = served(StandIn(), scratch=1 << 20)
    first = found.runner.cache.stores[0]
    variants = [
        kernel_timing.KernelVariant(mx.float32, 4, 2, 64, 64, (), (), 0.125, 0, None),
    ]
    handle, keys = kernel_timing._handle(
        first.layers[0].geometry, SCHEMES[0], first, StandIn().backend()
    )

    assert kernel_timing._is_for(variants[0], first.layers[0].geometry)
    assert 2 * handle.store.pages.nbytes <= first.scratch.limit // 2
    assert 64 <= keys < kernel_timing.KEYS


@pytest.mark.parametrize(
    ("setting", "plain"), [("reference", True), ("auto", False), (None, False)]
)
def test_the_environment_forces_plain_operations(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, *, plain: bool
) -> None:
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(kernel_choice.VARIABLE, setting)

    assert kernel_choice.plain_only() == plain


@pytest.mark.parametrize(
    ("setting", "path", "reason"),
    [("reference", "reference", "switched off"), ("auto", "fused", None)],
)
def test_loading_tries_kernels_unless_the_environment_forbids_them(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    path: str,
    reason: str | None,
) -> None:
    caplog.set_level(logging.INFO, "kvd.worker")
    monkeypatch.setenv(kernel_choice.VARIABLE, setting)
    monkeypatch.setattr(kernel_choice, "find_kernels", StandIn().backend)
    times = itertools.cycle([2.0, 0.5])  # of the first call and of the second
    monkeypatch.setattr(timed_kernels, "_seconds", lambda work: (mx.eval(work()), next(times))[1])
    stages: list[str] = []
    loaded = SimpleNamespace(model=model_of("qwen3"), vocab_size=VOCAB, own_products=False)
    found = loading.serve(
        loaded,  # type: ignore[arg-type]
        CacheSettings(),
        None,
        lambda stage, _: stages.append(stage),
    )

    assert found.path.startswith(path)
    assert found.fused is not None
    assert found.fused.reason == reason
    assert found.fused.used == (reason is None)
    assert [stage.startswith("attention kernels compiled") for stage in stages] == (
        [] if reason else [True]
    )
    assert f"attention: {found.path}, error " in caplog.text
    assert f"fused attention is {'not used: switched off' if reason else 'used'}" in caplog.text


def test_an_engine_serves_with_kernels_and_counts_them(
    monkeypatch: pytest.MonkeyPatch, demo: Driver
) -> None:
    kernels = StandIn()
    monkeypatch.setattr(kernel_choice, "find_kernels", kernels.backend)
    # `test_fused` covers compiled steps, which take long to compile for the CPU.
    monkeypatch.setattr(runner, "obstacle", lambda _: "switched off by the test")
    fused = Driver(shallow.path())
    loaded = kernels.launches
    prompt = list(range(5, 140))
    texts = [driver.alone(prompt, max_tokens=20).text for driver in (demo, fused)]

    assert texts[0] == texts[1]
    assert demo.engine.stats().kernel_launches == 0
    assert fused.info.attention_path.startswith("fused")
    assert fused.info.fused is not None
    # Each layer launches two kernels in a step.
    assert kernels.launches - loaded >= 2 * fused.info.layers * 19
    assert fused.engine.stats().kernel_launches == kernels.launches


def test_the_cpu_has_no_kernels() -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("an accelerator")
    assert kernel_choice.find_kernels() is None
