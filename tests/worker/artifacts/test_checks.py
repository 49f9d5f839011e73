"""Results of checks: kept if they passed, used again only under the same key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.worker.artifacts.checks import Checks
from kvd.worker.artifacts.entries import Entries
from protocol.types import FusedAttention


@pytest.fixture
def stored(tmp_path: Path) -> Entries:
    return Entries(tmp_path / "kvd" / "checks", 10_000)


class Check:
    """A check that counts how often it runs."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.runs = 0

    def __call__(self) -> Any:
        self.runs += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_a_passed_check_runs_once(stored: Entries) -> None:
    check = Check(0.1 + 0.2)
    for _ in range(2):
        checks = Checks(stored, "key")
        assert checks.result("error", check, float) == check.found
        checks.keep()
    assert check.runs == 1


def test_a_check_runs_again_for_another_model_or_machine(stored: Entries) -> None:
    check = Check(found=True)
    for key, name in (("a", "b"), ("b", "b"), ("a", "c")):
        checks = Checks(stored, key)
        assert checks.under(name).agrees("same", check)
        checks.keep()
    assert check.runs == 3


def test_a_failed_check_is_not_kept(stored: Entries) -> None:
    failed, wrong = Check(found=False), Check(ValueError("wrong"))
    for _ in range(2):
        checks = Checks(stored, "key")
        assert not checks.agrees("agree", failed)
        with pytest.raises(ValueError, match="wrong"):
            checks.result("error", wrong, float)
        checks.keep()
    assert (failed.runs, wrong.runs) == (2, 2)
    assert stored.names() == []


def test_nothing_is_kept_of_a_load_that_did_not_end(stored: Entries) -> None:
    assert Checks(stored, "key").agrees("agree", lambda: True)
    assert stored.names() == []


def test_results_keep_their_types(stored: Entries) -> None:
    given = FusedAttention(used=True, call_ms=0.5, rows=4), 0.25
    for _ in range(2):
        checks = Checks(stored, "key")
        found = checks.result("kernels", lambda: given, tuple[FusedAttention, float])
        assert found == given
        assert isinstance(found[0], FusedAttention)
        checks.keep()


def _overwrite(stored: Entries) -> None:
    (stored.folder / "key").write_bytes(b"damaged")


def _foreign(stored: Entries) -> None:
    stored.put("key", b"not a result")


def _other_type(stored: Entries) -> None:
    checks = Checks(stored, "key")
    checks.result("other", lambda: "text", str)
    checks._results.known["error"] = checks._results.known["other"]
    checks.keep()


@pytest.mark.parametrize("damage", [_overwrite, _foreign, _other_type])
def test_a_result_that_cannot_be_read_is_computed_again(
    stored: Entries, damage: Callable[[Entries], None]
) -> None:
    check = Check(0.5)
    for _ in range(2):
        checks = Checks(stored, "key")
        checks.result("error", check, float)
        checks.keep()
    damage(stored)
    for _ in range(2):
        checks = Checks(stored, "key")
        assert checks.result("error", check, float) == 0.5
        checks.keep()
    assert check.runs == 2


def test_without_a_store_every_check_runs() -> None:
    check = Check(found=True)
    for _ in range(2):
        checks = Checks()
        assert checks.agrees("agree", check)
        checks.keep()
    assert check.runs == 2
