"""Sampling takes no more memory than is charged, with any settings."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.sampling.row import RowSettings
from kvd.worker.sampling.sampler import Sampler
from protocol.memory_bounds import step_bytes
from protocol.types import Sampling

pytestmark = pytest.mark.mlx

VOCAB = 65_536
ROWS = 64
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
NUCLEUS = {"temperature": 0.8, "seed": 1, "top_p": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "logprobs"),
    [
        (Sampling(), None),
        (Sampling(**PENALTIES), 5),
        (Sampling(**NUCLEUS, top_k=40), 5),
        (Sampling(**NUCLEUS, **PENALTIES, top_k=500, logit_bias={5: 1.0}), 5),
    ],
    ids=["greedy", "penalties", "top-k", "all"],
)
def test_steps_of_a_pipelined_loop(sampling: Sampling, logprobs: int | None) -> None:
    hidden, head = mx.random.normal((ROWS, 16)), mx.random.normal((16, VOCAB))
    mx.eval(hidden, head)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    sampler, draws = Sampler(VOCAB), list[Any]()
    for row in range(ROWS):  # as when a request forks, or all rows are rebuilt
        sampler.add(row, RowSettings(sampling, row, logprobs=logprobs), range(100), [7] * row)
    for step in range(2):
        draws.append(sampler.draw(hidden @ head, range(ROWS), [step] * ROWS))
        mx.async_eval(draws[-1].arrays())
        if step:
            draws.pop(0).read()
    draws.pop().read()
    used = mx.get_peak_memory() - before

    config = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16}
    charged = step_bytes(config, 1, ROWS, on_cpu=True)
    assert used < charged, f"{used / charged:.2f} of the charge"
