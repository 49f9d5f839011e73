"""`bench/ssd` on the embedded model and short prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.ssd import __main__ as daemons
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
    first_read = case["first_read"]
    assert first_read["grow_s"] > 0
    assert first_read["first_copies_s"] > 0
    assert engine.line("demo", case).split()[:2] == ["demo", "768"]
    written = case["written"]
    assert (written["segments"], written["tokens"]) == (1, 768)
    assert written["page_bytes"] < written["file_bytes"] == case["read_alone"]["bytes"]
    assert all(case["read_alone"][f"copied_{count}_threads_s"] > 0 for count in (1, 2, 4, 6))
    assert written["page_bytes"] < written["fp16_bytes"]
    assert case["streams"]["reads"] == 2
    assert case["streams"]["cpu_ratio"] > 0
    assert case["streams"]["gaps"] >= streams.STREAMS
    assert list(tmp_path.iterdir()) == [file]


def test_a_prefix_that_is_not_worth_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "MIN_SECONDS", 1e9)
    file = tmp_path / "ssd.json"
    engine.main(["--model", "demo", "--tokens", "256", "--runs", "1", "--json", str(file)])
    (case,) = json.loads(file.read_text())["cases"]

    assert "written" not in case
    assert engine.verdicts(case) == case["bars"] == []


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
    missed = [str(bar) for bar in engine.verdicts(case) if not bar.passed]

    assert missed == [
        "disk, uncached, answers that differ: 1.000, at most 0: MISS",
        "p99 between tokens during a read: 1.400, at most 1.3: MISS",
    ]
    long = engine.verdicts(case | {"cold_s": 2.1})
    assert [bar.limit for bar in long if "time of cold" in bar.what] == [0.1, 0.1]


@pytest.mark.slow
def test_a_run_with_a_daemon_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "ssd.json"
    # Prefixes that take less than 0.25 s are not stored; fast cores make 9000 tokens/s,
    # and the first turn must take twice as long.
    daemons.main(["--tokens", "6000", "--runs", "1", "--json", str(file)])
    result = json.loads(file.read_text())

    (run,) = result["runs"]
    assert run["cold"]["cached_tokens"] == 0
    for name in ("ram", *daemons.RESTORED):
        assert run[name]["cached_tokens"] == result["disk"]["tokens"], name
        assert run[name]["equal_to_cold"], name
    assert result["disk"]["page_bytes"] < result["disk"]["file_bytes"]
    assert len(result["bars"]) == 3 * 4 + 1


def test_the_summary_takes_the_first_cold_run_apart() -> None:
    def run(cold_s: float, ttft_s: float) -> dict[str, object]:
        one = {"prompt_tokens": 100, "cached_tokens": 96, "equal_to_cold": True}
        restored = one | {"ttft_s": ttft_s, "load_s": 1.0, "start_s": 0.5}
        return {
            "cold": one | {"ttft_s": cold_s}, "ram": restored, "evicted": restored,
            "restarted": restored, "killed": restored | {"equal_to_cold": False},
        }  # fmt: skip

    runs = [run(9.0, 0.6), run(4.0, 0.2), run(6.0, 0.4)]
    result = {"runs": runs, "cold_load_s": 1.0, "disk": {"beyond_pages": 0.02}}
    result["medians"] = daemons.summary(result)

    assert (result["medians"]["cold_first_s"], result["medians"]["cold_s"]) == (9.0, 5.0)
    assert result["medians"]["evicted"]["share_of_cold"] == 0.4 / 5
    assert result["medians"]["evicted"]["with_load_share"] == pytest.approx(1.4 / 6)
    missed = [bar.what for bar in daemons.verdicts(result) if not bar.passed]
    assert missed == ["killed, answers that differ"]
