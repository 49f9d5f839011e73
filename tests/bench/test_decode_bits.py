"""`bench.decode_bits` compares schemes on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import decode_bits

pytestmark = pytest.mark.mlx


def test_sides_are_compared_with_the_first(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    run = ["--rows", "2", "--prompts", "64", "--rounds", "1", "--json", str(file)]
    decode_bits.main(["--kv", "k4v4", "k4v4:auto", *run])
    result = json.loads(file.read_text())
    plain, auto = result["bits"].values()
    assert plain["reason"] == "switched off" != auto["reason"]
    [length] = result["lengths"]
    [first], [second] = length["ms"].values()
    assert length["speeds"] == {"k4v4": [1.0], "k4v4:auto": [first / second]}
