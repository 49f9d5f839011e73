"""`bench/serve`: order of the rounds, repeated plays, other programs' CPU time, and ratios."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.llama import settings
from bench.serve import __main__ as program
from bench.serve import comparison, machine, ratios, report, sides
from bench.serve.comparison import ATTEMPTS, Comparison
from bench.serve.rounds import Round, plan
from kvd.bench.measure import Measures, Stream
from kvd.bench.prompts import Prompts
from kvd.bench.report import rounded
from kvd.bench.servers import url_side
from kvd.bench.traces import TRACES


def measures(**changes: float) -> Measures:
    values = dict.fromkeys(Measures.__dataclass_fields__, 1.0)
    return Measures(**(values | changes))  # type: ignore[arg-type]


def test_a_trace_that_is_named_again_is_played_again_under_another_title() -> None:
    found = list(plan(["steady", "long/2", "steady", "steady"], 2))

    assert [(one.title, one.run) for one in found] == [
        ("steady", 0), ("steady", 1), ("long/2", 0), ("long/2", 1),
        ("steady #2", 0), ("steady #2", 1), ("steady #3", 0), ("steady #3", 1),
    ]  # fmt: skip


@given(
    st.lists(st.sampled_from(list(TRACES)), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_no_two_plays_of_a_trace_have_equal_words_and_a_run_keeps_its_lengths(
    names: list[str], runs: int
) -> None:
    rounds = list(plan(names, runs))
    plays = [(one.trace, one.words(attempt)) for one in rounds for attempt in range(ATTEMPTS)]

    assert len(set(plays)) == len(plays)
    for one in rounds:
        assert one.build(1) == Round(one.trace, one.run).build(1)


def test_busy_time_is_that_of_all_columns_but_idle_and_waiting(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  1 2 4 1000 1000 8 16 32 64 128\ncpu0 1 1 1 1 1 1 1 1\n")

    assert machine.busy_s(tmp_path) == 63 / os.sysconf("SC_CLK_TCK")
    assert math.isnan(machine.busy_s(tmp_path / "none"))


async def test_waiting_for_a_quiet_machine_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 10.0, 10.0, 20.0, 20.0, 20.0, 30.0])
    monkeypatch.setattr(machine, "busy_s", lambda: next(readings))
    monkeypatch.setattr(machine, "_LOOK_S", 0.001)
    await machine.quiet(0.1)

    assert next(readings) == 30.0  # two looks were busy, the third was quiet
    monkeypatch.setattr(machine, "busy_s", lambda: math.nan)  # no /proc
    await asyncio.wait_for(machine.quiet(0.1), 5)
    busy = iter(range(10**9))
    monkeypatch.setattr(machine, "busy_s", lambda: float(next(busy)))
    await asyncio.wait_for(machine.quiet(0.1, patience_s=0.01), 5)


class Instant:
    """A driver that answers at once; the tokens are words."""

    path = ""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def ask(self, prompt: str, output: int, stream: Stream) -> None:
        self.prompts.append(prompt)
        for number in range(output):
            stream.arrived(stream.sent + 0.001 * (number + 1))
        stream.prompt_tokens, stream.output_tokens = len(prompt.split()), output

    async def close(self) -> None: ...


def comparison_of(names: list[str], share: float | None) -> tuple[Comparison, Instant]:
    driver = Instant()
    servers: Any = {
        name: SimpleNamespace(side=url_side(name, "http://x"), driver=driver, pids=list)
        for name in names
    }
    prompts = Prompts(str.split, list("abcdefgh"))
    console = Console(file=io.StringIO())
    made = Comparison(servers, prompts, seed=1, timeout_s=60, console=console, quiet_share=share)
    return made, driver


def disturb(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    """Let other programs use so many CPU seconds during the plays."""
    total = 0.0
    spans = iter(seconds)
    begun = False

    def busy() -> float:
        nonlocal total, begun
        if begun:
            total += next(spans)
        begun = not begun
        return total

    async def quiet(_: float) -> None: ...

    monkeypatch.setattr(comparison, "busy_s", busy)
    monkeypatch.setattr(comparison, "quiet", quiet)


@pytest.mark.parametrize(
    ("share", "seconds", "plays", "counted"),
    [
        (None, [9e9], 1, 0),
        (0.2, [9e9, 9e9, 0.0], 3, 2),
        (0.2, [0.0], 1, 0),
        (0.2, [9e9, 5.0, 8e9, 9e9], ATTEMPTS, 1),
        (0.2, [math.nan], 1, 0),
    ],
)
async def test_a_disturbed_run_is_repeated_with_other_words(
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
    seconds: list[float],
    plays: int,
    counted: int,
) -> None:
    disturb(monkeypatch, seconds)
    made, driver = comparison_of(["one"], share)
    await made.run(Round("alone", 0))

    assert len(made.results["alone"]["one"]) == 1
    assert [one["attempt"] for one in made.details] == list(range(plays))
    assert [one["counted"] for one in made.details].index(True) == counted
    assert sum(one["counted"] for one in made.details) == 1
    assert len(set(driver.prompts)) == plays


async def test_the_order_of_the_sides_rotates() -> None:
    made, _ = comparison_of(["a", "b", "c", sides.PLAIN_8_BITS], None)
    for one in plan(["alone"], 3):
        await made.run(one)

    assert [one["side"] for one in made.details] == [*"abc", *"bca", *"cab"]
    assert list(made.results["alone"]) == [*"abc"]


def test_sides_are_chosen_by_patterns() -> None:
    every = [url_side(name, "http://x") for name in ("kvd a", "kvd b", "llama a")]

    assert sides.choose(every, []) == every
    assert [one.name for one in sides.choose(every, ["llama*", "kvd b"])] == ["kvd b", "llama a"]
    with pytest.raises(ValueError, match=r"unknown --sides 'mlx\*'; the sides are 'kvd a', "):
        sides.choose(every, ["kvd*", "mlx*"])


LLAMA, FASTER = "llama f16", "llama f16 fa ub256"


def results() -> dict[str, dict[str, list[Measures]]]:
    ours = [measures(tok_s=1.0), measures(tok_s=6.0), measures(tok_s=8.0)]
    return {
        "steady": {
            "kvd k8v8": ours,
            "mlx-lm": [measures()] * 3,
            LLAMA: [measures(tok_s=9.0), measures(tok_s=1.0), measures(tok_s=1.0)],
            FASTER: [measures(tok_s=2.0, peak_bytes=math.nan)] * 3,
        },
        "steady #2": {"kvd k8v8": [measures(tok_s=3.0)], "mlx-lm": []},
    }


def test_the_best_setting_is_that_of_the_trace_and_ratios_are_within_runs() -> None:
    assert {LLAMA, FASTER} <= settings.SETTINGS.keys()
    assert ratios.best_llama(results()["steady"]) == FASTER
    assert ratios.best_llama({"mlx-lm": [measures()]}) is None
    found = ratios.as_json(results())["steady"]

    assert list(found) == ["kvd k8v8 / mlx-lm", "kvd k8v8 / best llama"]
    assert found["kvd k8v8 / best llama"]["tok_s"] == {
        "median": 3.0, "first": 0.5, "others": 3.5, "least": 0.5, "most": 4.0,
    }  # fmt: skip
    text = json.dumps(rounded(found), allow_nan=False)
    assert json.loads(text)["kvd k8v8 / best llama"]["peak_bytes"]["median"] is None


def test_first_runs_and_repeated_traces_are_reported() -> None:
    first = ratios.firsts(results())["steady"]["kvd k8v8"]
    assert (first["first"]["tok_s"], first["others"]["tok_s"]) == (1.0, 7.0)
    assert ratios.again(results())["steady #2"]["kvd k8v8"]["tok_s"] == 0.5
    assert list(ratios.again(results())["steady #2"]) == ["kvd k8v8"]
    table = report.trace_table("steady", results()["steady"])

    assert list(table.columns[0].cells)[4:] == [
        "kvd k8v8 / mlx-lm",
        f"kvd k8v8 / {FASTER}",
    ]
    assert report.first_runs_table(results()).row_count == 8
    assert report.again_table(results()).row_count == 1


def test_a_trace_that_is_longer_than_the_models_context_is_refused() -> None:
    program.check_context(["chats/4", "steady"], {"max_position_embeddings": 4096})
    program.check_context(["chats"], {})
    with pytest.raises(ValueError, match=r"chats has 12192 tokens, .* 4096; --traces chats/N"):
        program.check_context(["chats"], {"text_config": {"max_position_embeddings": 4096}})


async def test_rounds_without_time_are_left_out() -> None:
    made, _ = comparison_of(["a"], None)
    options = argparse.Namespace(traces=["alone", "alone"], runs=2, seconds=0.0)
    console = Console(file=io.StringIO())

    assert await program._play(made, options, console) == [
        "alone 1", "alone 2", "alone #2 1", "alone #2 2",
    ]  # fmt: skip
    options.seconds = math.inf
    assert await program._play(made, options, console) == []
    assert list(made.results) == ["alone", "alone #2"]
