"""`bench/ssd` on the embedded model and short prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.ssd import engine, streams
from kvd.worker.prefix import segment_index

pytestmark = pytest.mark.mlx


def test_a_run_without_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(streams, "UNDISTURBED_STEPS", 5)
    file = tmp_path / "ssd.json"
    engine.main([
        "--model", "demo", "--tokens", "768", "--runs", "1", "--store", str(tmp_path),
        "--json", str(file),
    ])  # fmt: skip
    (case,) = json.loads(file.read_text())["cases"]

    assert case["prompt_tokens"] == 768 + 64 + 160
    assert case["cold_equal"]
    for name, reads in (("ram", 0), ("disk", 1), ("disk, uncached", 1)):
        assert case[name]["equal_to_cold"], name
        assert case[name]["restored_from_disk"] == reads
        assert case[name]["cached_share"] == 768 / case["prompt_tokens"]
    written = case["written"]
    assert (written["segments"], written["tokens"]) == (1, 768)
    assert written["page_bytes"] < written["file_bytes"] == case["read_alone"]["bytes"]
    assert written["page_bytes"] < written["fp16_bytes"]
    assert case["streams"]["reads"] == 1
    assert case["streams"]["gaps"] >= streams.STREAMS
    assert list(tmp_path.iterdir()) == [file]


def test_a_prefix_that_is_not_worth_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "MIN_SECONDS", 1e9)
    file = tmp_path / "ssd.json"
    engine.main(["--model", "demo", "--tokens", "256", "--runs", "1", "--json", str(file)])
    (case,) = json.loads(file.read_text())["cases"]

    (line,) = engine.verdicts(case)
    assert line.startswith("256: not stored")


def test_a_length_that_would_take_too_long_is_skipped() -> None:
    done = [{"tokens": 1000, "cold_first_s": 1.0}]
    budget = engine.Budget(minutes=1.0)

    assert budget.allows(1000, [], runs=2)
    assert budget.allows(3000, done, runs=2)  # 10 s + 5 prefills of 9 s
    assert not budget.allows(4000, done, runs=2)


def test_verdicts() -> None:
    met = {"share_of_cold": 0.2, "cached_share": 0.96, "equal_to_cold": True}
    case = {
        "tokens": 11, "cold_s": 1.9, "disk": met,
        "disk, uncached": met | {"equal_to_cold": False},
        "written": {"beyond_pages": 0.02}, "streams": {"ratio": 1.4},
    }  # fmt: skip
    missed = [line for line in engine.verdicts(case) if line.endswith("MISS")]

    assert missed == [
        "11: disk, uncached, answers that differ: 1.000, at most 0: MISS",
        "11: p99 between tokens, of the undisturbed: 1.400, at most 1.3: MISS",
    ]
    shares = [line for line in engine.verdicts(case | {"cold_s": 2.1}) if "time of cold" in line]
    assert all(line.endswith("0.200, at most 0.1: MISS") for line in shares)
