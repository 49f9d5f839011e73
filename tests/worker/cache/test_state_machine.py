"""Thousands of random operations on a model's whole cache, compared with dense rows.

After every operation, contents, lengths, levels, reference counts, bytes and states agree with
`tests.worker.cache.model`. Some operations also compare attention over pages or rectangles with
attention over dense keys and values (`tests.worker.cache.machine`). By default the operations are
the same every time; ``KVD_STATE_STEPS=100000`` runs 100,000 with a random seed.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.worker.cache.machine import HOUSEKEEPING, Machine
from tests.worker.cache.worlds import WORLDS

pytestmark = pytest.mark.mlx

CI_STEPS = 4_000
STEPS = int(os.environ.get("KVD_STATE_STEPS", CI_STEPS))
EXAMPLES_A_ROUND = 8
"""Three rounds of each world make `CI_STEPS` and few more."""
STEPS_AN_EXAMPLE = 40
"""Operations of an example, including its start."""
RULES = (
    *HOUSEKEEPING,
    "insert",
    "prefill",
    "decode",
    "trim",
    "snapshot",
    "restore",
    "drop",
    "free",
    "step_down",
    "slice",
    "finish_step_downs",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_the_cache_agrees_with_dense_rows(name: str) -> None:
    seen: Counter[str] = Counter()
    machine = type("Machine", (Machine,), {"world": WORLDS[name], "seen": seen})
    wanted = STEPS // len(WORLDS)
    plan = settings(
        max_examples=EXAMPLES_A_ROUND,
        stateful_step_count=STEPS_AN_EXAMPLE,
        database=None,
        deadline=None,
        # No shrinking: examples are so slow that reading a long one takes less time.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    # In rounds, since examples may stop early: hypothesis limits the draws of an example.
    for number in itertools.count(0 if STEPS == CI_STEPS else random.randrange(1 << 32)):
        run_state_machine_as_test(seed(number)(machine), settings=plan)
        if seen["steps"] >= wanted:
            break
    grouped = ("prefill_packed",) if WORLDS[name].cache().can_pack else ()
    for operation in (*RULES, *grouped, "attention", "trimmed", "interrupted", "converted pages"):
        assert seen[operation] or STEPS < CI_STEPS, operation
