"""`bench.soak`, short: its streams agree with the undisturbed run, and its verdict finds growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.soak.__main__ import main
from bench.soak.report import verdicts


@pytest.mark.slow
def test_a_short_soak_holds(tmp_path: Path) -> None:
    result = tmp_path / "soak.json"
    options = {
        "--minutes": "0.1", "--players": "4", "--kinds": "4", "--tokens": "24", "--rate": "4",
        "--sample-every": "1", "--fault-every": "1.5", "--daemon-kills": "1",
        "--json": str(result), "--plot": str(tmp_path / "soak.svg"),
    }  # fmt: skip

    main([word for option in options.items() for word in option])

    found = json.loads(result.read_text())
    assert not found["wrong"]
    assert found["compared"] > 0
    assert found["violations"] == 0
    assert found["faults"]["daemon killed"] == 1
    assert "per further token" in (tmp_path / "soak.svg").read_text()


def test_growth_in_the_last_life_is_found() -> None:
    flat = [_sample(at, rss=50.0) for at in range(100)]
    growing = [_sample(at, rss=50.0 + at) for at in range(100)]
    an_earlier_life = [_sample(at, rss=500.0, life=1) for at in range(100)]

    assert verdicts(flat)["daemon_rss_mib"]["flat"]
    assert verdicts([*an_earlier_life, *flat])["daemon_rss_mib"]["flat"]
    assert not verdicts(growing)["daemon_rss_mib"]["flat"]


def _sample(at: int, *, rss: float, life: int = 2) -> dict[str, Any]:
    process = {"rss_mib": rss, "threads": 4, "descriptors": 20}
    return {
        "at": at,
        "life": life,
        "daemon": process,
        "steady": process,
        "journal_mib": 1.0,
        "swap_mib": 0.0,
        "first_p50_s": None,
        "token_p50_s": None,
    }
