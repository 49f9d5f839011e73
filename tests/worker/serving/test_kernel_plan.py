"""All kernels that the probe runs are requested ahead, so that they are compiled together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.artifacts import modules
from kvd.worker.attention.kernels.arguments import (
    Append,
    Attend,
    Attention,
    Pack,
    PutTails,
    Spread,
    Unpack,
)
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import kernel_plan, kernel_timing, probe
from kvd.worker.serving.kernel_timing import Times
from tests.worker.attention.stand_in import StandIn
from tests.worker.serving.test_probe import VOCAB, model_of

pytestmark = pytest.mark.mlx
SCHEMES = (Scheme(8, 8), Scheme(8, 4), Scheme(4, 4))


class Ahead:
    """Modules that only know whether a request comes ahead."""

    def __init__(self) -> None:
        self.active = False

    @contextmanager
    def ahead(self, fraction: float) -> Iterator[None]:
        assert 0 < fraction < 1
        self.active = True
        try:
            yield
        finally:
            self.active = False


class Requests(StandIn):
    """Records what kernels' texts depend on, ahead and later."""

    def __init__(self, ahead: Ahead) -> None:
        super().__init__()
        self._ahead = ahead
        self.early: set[Any] = set()
        self.late: set[Any] = set()

    def _note(self, *about: Any) -> None:
        (self.early if self._ahead.active else self.late).add(repr(about))

    def decode_attention(self, given: Attention) -> mx.array:
        self._note(
            given.queries.dtype, given.queries.shape[1:], given.tail_keys.shape[1:],
            given.tail_values.shape[1:], given.key_packings, given.value_packings, given.schemes,
            given.scale, given.keep, given.sinks is None,
        )  # fmt: skip
        if self._ahead.active:
            return mx.zeros(given.queries.shape, given.queries.dtype)
        return super().decode_attention(given)

    def append(self, given: Append) -> tuple[mx.array, mx.array]:
        shapes = given.tail_keys.shape[1:], given.tail_values.shape[1:]
        self._note(given.tail_keys.dtype, *shapes, given.token_rows is None)
        return super().append(given)

    def pack(self, given: Pack) -> list[mx.array]:
        self._note("pack", given.packings, given.paged is None, given.tokens.keys.shape[1:])
        return super().pack(given)

    def unpack(self, given: Unpack) -> mx.array:
        self._note("unpack", given.key_packings, given.value_packings)
        return super().unpack(given)

    def spread(self, given: Spread) -> tuple[mx.array, mx.array, mx.array]:
        self._note("spread", given.rotation)
        return super().spread(given)

    def attend(self, given: Attend) -> mx.array:
        shapes = (one.shape[1:] for one in (given.queries, given.keys, given.values))
        self._note("attend", *shapes, given.scale)
        return super().attend(given)

    def put_tails(self, given: PutTails) -> tuple[mx.array, mx.array]:
        self._note("put_tails")
        return super().put_tails(given)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    ahead = Ahead()
    monkeypatch.setattr(modules, "_current", ahead)
    times = Times(fused_s=1e-3, reference_s=2e-3, keys=64)
    monkeypatch.setattr(kernel_timing, "compare", lambda *_: times)
    return Requests(ahead)


@pytest.mark.parametrize("settings", [{}, {"quantized_start": 128}, {"max_size": 512}], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_the_probe_uses_no_kernel_that_was_not_requested_ahead(
    requests: Requests, kind: str, settings: dict[str, Any]
) -> None:
    window = {"sliding_window": 64, "sliding_window_pattern": 2}
    model = model_of(kind, **(window if kind == "gemma3_text" else {"num_hidden_layers": 1}))
    found = probe.serve(
        model, CacheSettings(SCHEMES, **settings), VOCAB, kernels=requests.backend()
    )
    assert found.path == "fused"
    assert requests.late
    assert requests.late <= requests.early


def test_a_plan_that_fails_leaves_everything_to_the_checks(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such step")

    monkeypatch.setattr(kernel_plan, "_build", fail)
    model = model_of("qwen3", num_hidden_layers=1)
    found = probe.serve(model, CacheSettings(SCHEMES), VOCAB, kernels=requests.backend())
    assert found.path == "fused"
    assert not requests.early
