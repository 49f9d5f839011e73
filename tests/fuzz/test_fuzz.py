"""Each target on its whole corpus, and on some new inputs. `python -m tests.fuzz` runs longer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.breadth import ALL
from tests.fuzz.campaign import Failure, run
from tests.fuzz.mutations import edited_json
from tests.fuzz.targets import TARGETS

SEED = 1
"""Fixed, so that a change is judged by the same inputs as the version before. Runs by hand draw new
ones."""


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.parametrize("name", TARGETS)
def test_only_typed_errors_whatever_the_input(name):
    target = TARGETS[name]()
    with target.checking() as check:
        for file in target.corpus():
            check(file.read_bytes())
        try:
            run(target, check, target.examples if ALL else target.examples // 2, SEED)
        except Failure as failure:
            pytest.fail(f"seed {SEED}, input {failure.data!r}: {failure.cause!r}")


@settings(max_examples=20, deadline=None)
@given(edited_json([b"[" * 1500 + b"]" * 1500]))
def test_a_seed_that_is_too_deep_to_edit_as_a_tree_is_edited_as_bytes(data: bytes):
    assert len(data) <= 1 << 20  # in time, and without RecursionError


def test_a_failure_is_found_and_made_small():
    target = TARGETS["config"]()

    def check(data: bytes) -> None:
        if data.count(b"\n") > 3:
            raise ValueError("too many lines")

    with pytest.raises(Failure) as caught:
        run(target, check, 200, 1)
    assert caught.value.data.count(b"\n") > 3
    assert len(caught.value.data) < 500
