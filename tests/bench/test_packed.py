"""`bench.packed` on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import packed

pytestmark = pytest.mark.mlx


def test_larger_passes_are_fewer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "packed.json"
    sizes = ["--passes", "64", "512", "--chunk", "64", "--rounds", "1"]
    packed.main(["--prompts", "3x200", "1x600", *sizes, "--json", str(out)])

    report = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == report
    results = report["results"]
    assert [(one["prompts"], one["tokens"], one["pass_tokens"]) for one in results] == [
        *((3, 200, 64), (3, 200, 512)),
        *((1, 600, 64), (1, 600, 512)),
    ]
    assert results[1]["passes"] < results[0]["passes"]
    assert results[3]["passes"] < results[2]["passes"]
    for one in results:
        assert 0 < one["first_s"] <= one["last_s"]
        assert one["tokens_per_s"] == pytest.approx(one["prompts"] * one["tokens"] / one["last_s"])
        assert one["host_ms"] > 0
