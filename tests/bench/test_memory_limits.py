"""`bench.memory_limits`, short: attempts that take memory without end cost other models nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cgroup import NoCgroup, limited
from bench.memory_limits import MIB, main


@pytest.mark.slow
def test_hostile_models_in_a_control_group(tmp_path: Path) -> None:
    try:
        with limited(64 * MIB):
            pass
    except NoCgroup as error:
        pytest.skip(str(error))
    result = tmp_path / "limits.json"
    attempts = ["large tokenizer config", "template with a product"]
    options = ["--streams", "4", "--tokens", "24", "--out", str(result)]

    assert main([*options, "--attempts", *attempts]) == 0

    found = json.loads(result.read_text())
    assert found["oom_kills"] == 0
    assert found["streams"] == 4
    assert [found["attempts"][kind][0] for kind in attempts] == ["invalid_model", "invalid_request"]
    assert 256 < found["peak_private_mib"] <= found["limit_mib"]
