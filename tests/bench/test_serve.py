"""`bench/serve`: traces, statistics, fairness, and the harness on a kvd with the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.llama import settings
from bench.serve import goals, sides
from bench.serve.bars import Bar, judge
from bench.serve.ratios import BEST_LLAMA
from bench.serve.report import bars_table, plot, trace_table
from kvd.bench import processes, traces, twin
from kvd.bench.drivers import parse
from kvd.bench.measure import (
    Measures,
    Stream,
    Unfair,
    check_fair,
    median,
    percentile,
    ratio,
    summarize,
)
from kvd.bench.player import play
from kvd.bench.prompts import Prompts, words_of
from kvd.bench.report import as_json
from kvd.bench.servers import Fleet, kvd_side, mlx_lm_side
from kvd.bench.traces import Ask, Trace
from kvd.host.home import Home


def stream(
    sent: float, times: list[float], *, prompt: int = 4, output: int | None = None
) -> Stream:
    made = Stream(sent=sent, prompt_tokens=prompt)
    for when in times:
        made.arrived(when)
    made.output_tokens = len(times) if output is None else output
    return made


def measures(**changes: float) -> Measures:
    values = dict.fromkeys(Measures.__dataclass_fields__, 1.0)
    return Measures(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(traces.TRACES))
def test_a_trace_depends_only_on_its_seed_and_run(name: str) -> None:
    one = traces.build(name, 1, 0)

    assert one == traces.build(name, 1, 0)
    assert one.name == name
    assert all(ask.prompt > 0 and ask.output > 1 for ask in one.asks)
    assert one.longest < 16384
    if name in {"poisson", "unequal"}:
        assert one != traces.build(name, 2, 0)
        assert one != traces.build(name, 1, 1)


def test_the_traces_have_the_sizes_that_the_bars_assume() -> None:
    steady, long, shared = (traces.build(name, 1, 0) for name in ("steady", "long", "shared"))

    assert [(ask.prompt, ask.output) for ask in steady.asks] == [(200, 128)] * 8
    assert [ask.prompt for ask in long.asks if ask.behind] == [6000]
    assert sum(not ask.behind for ask in long.asks) == 7
    assert len(shared.asks) == 32
    assert {ask.shared for ask in shared.asks} == {1500}
    chats, dialogues, heavy = (traces.build(name, 1, 0) for name in ("chats", "turns", "heavy"))
    assert [(ask.prompt, ask.output) for ask in chats.asks] == [(12_000, 192)] * 8
    assert (len(dialogues.asks), dialogues.concurrency) == (24, 8)
    assert {(ask.shared, ask.output) for ask in dialogues.asks} == {(6000, 64)}
    assert len(heavy.asks) == 32
    assert all(800 <= ask.prompt <= 2500 and ask.output == 256 for ask in heavy.asks)


def test_a_shortened_trace_has_its_own_name_and_a_part_of_the_prompts() -> None:
    whole, quarter = (traces.build(name, 1, 0) for name in ("turns", "turns/4"))

    assert quarter.name == "turns/4"
    assert quarter.concurrency == whole.concurrency
    for ask, shorter in zip(whole.asks, quarter.asks, strict=True):
        assert (shorter.prompt, shorter.shared) == (ask.prompt // 4, 1500)
        assert shorter.output == ask.output
    assert all(ask.prompt == 1 for ask in traces.build("unequal/5000", 1, 0).asks)


@pytest.mark.parametrize("name", ["chat", "chats/", "chats/1", "chats/x", "chats/0.5", ""])
def test_a_trace_that_does_not_exist(name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no trace|number from 2"):
        traces.build(name, 1, 0)


def test_poisson_arrivals_have_the_rate() -> None:
    trace = traces.poisson(random.Random(1), requests=4000, rate=5.0)
    times = [ask.at_s for ask in trace.asks]

    assert times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(1 / 5.0, rel=0.05)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-6)


def test_the_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 50))


def test_gaps_count_every_token_once() -> None:
    one = Stream(sent=0.0)
    one.arrived(1.0, 1)
    one.arrived(1.5, 3)
    one.arrived(2.5, 1)
    one.output_tokens = 5
    assert one.gaps() == [0.5, 0.0, 0.0, 1.0]
    assert one.ttft == 1.0

    one.output_tokens = 7  # two more, whose text came together with that of a later token
    assert sorted(one.gaps()) == [0.0, 0.0, 0.0, 0.0, 0.5, 1.0]
    assert one.gaps(since=1.6, until=2.0) == [1.0]
    assert one.gaps(since=3.0) == []


def test_a_run_is_summarized() -> None:
    trace = Trace("two", (Ask(4, 4), Ask(4, 2, behind=1)))
    found = summarize(trace, [stream(0.0, [1.0, 1.1, 2.9, 3.0]), stream(1.0, [2.0, 3.5])])

    assert found.tokens == 6
    assert found.wall_s == 3.5
    assert found.tok_s == pytest.approx(6 / 3.5)
    assert found.ttft_p50 == pytest.approx(1.0)
    # Two tokens of one stream within the second in which both ran.
    assert found.decode_tok_s == pytest.approx(2 / 1.0)
    assert found.late_ttft == pytest.approx(1.0)
    assert found.during_p99 == pytest.approx(percentile([0.1, 1.8], 99))


@pytest.mark.parametrize(("prompt", "output"), [(5, 4), (4, 3)])
def test_a_stream_with_unexpected_token_counts_is_unfair(prompt: int, output: int) -> None:
    trace = Trace("one", (Ask(4, 4),))
    check_fair(trace, [stream(0.0, [1, 2, 3, 4])])
    with pytest.raises(Unfair, match=r"request 0 of one: \(4, 4\)"):
        check_fair(trace, [stream(0.0, [1, 2, 3, 4], prompt=prompt, output=output)])


def test_a_ratio_compares_runs_in_pairs() -> None:
    ours = [measures(tok_s=20.0), measures(tok_s=2.0), measures(tok_s=30.0)]
    theirs = [measures(tok_s=10.0), measures(tok_s=1.0), measures(tok_s=10.0)]

    assert ratio(ours, theirs, "tok_s") == 2.0
    assert median(ours)["tok_s"] == 20.0
    assert math.isnan(ratio([], [], "tok_s"))


def test_bars_pass_or_miss_or_were_not_measured() -> None:
    results = {"steady": {"a": [measures(tok_s=3.0)], "b": [measures(tok_s=1.0)], "c": []}}

    def bar(ours: str, limit: float, *, at_least: bool = True, trace: str = "steady") -> Bar:
        return Bar("what", trace, "tok_s", ours, "b", limit, at_least)

    verdicts = judge(
        [bar("a", 3.0), bar("a", 3.1), bar("a", 2.0, at_least=False), bar("c", 1.0),
         bar("a", 1.0, trace="long")],
        results,
    )  # fmt: skip
    assert [one.passed for one in verdicts] == [True, False, False, None, None]
    assert bars_table(verdicts).row_count == 5


def test_a_bar_may_be_for_every_run_for_one_side_or_for_two_traces() -> None:
    results = {
        "steady": {"a": [measures(tok_s=2.0), measures(tok_s=4.0)], "b": [measures()] * 2},
        "steady #2": {"a": [measures(tok_s=1.5)]},
    }
    bars = [
        Bar("", "steady", "tok_s", "a", "b", 2.5, at_least=True),
        Bar("", "steady", "tok_s", "a", "b", 2.5, at_least=True, every_run=True),
        Bar("", "steady", "tok_s", "a", "b", 3.5, at_least=False, every_run=True),
        Bar("", "steady", "tok_s", "a", "", 2.5, at_least=True),
        Bar("", "steady #2", "tok_s", "a", "a", 0.9, at_least=True, than="steady"),
    ]
    assert [one.ratio for one in judge(bars, results)] == [3.0, 2.0, 4.0, 3.0, 0.5]
    assert [one.passed for one in judge(bars, results)] == [True, False, False, True, False]


@pytest.mark.parametrize("accelerated", [False, True])
def test_every_bar_names_sides_and_measures_that_exist(tmp_path: Path, accelerated: bool) -> None:
    made = sides.make("/m", tmp_path, Path("/lib/blas.so"), ["other=http://127.0.0.1:1#name"])
    names = {"", BEST_LLAMA, *settings.SETTINGS, *(side.name for side in made)}
    found = goals.bars([*traces.TRACES, "steady"], accelerated=accelerated, llama=True)

    assert {bar.trace for bar in found} == {*traces.TRACES, "steady #2"}
    for bar in found:
        assert {bar.ours, bar.theirs} <= names
        assert bar.measure in Measures.__dataclass_fields__
        assert sides.takes_part(bar.ours, bar.trace)
        assert sides.takes_part(bar.theirs, bar.trace)
    assert (made[-1].url, made[-1].model) == ("http://127.0.0.1:1", "name")
    with pytest.raises(ValueError, match="NAME=http"):
        sides.make("/m", tmp_path, None, ["http//x"])


def test_a_side_of_mlx_lm_preloads_the_given_blas() -> None:
    with_blas = mlx_lm_side("a", "/m", blas=Path("/lib/blas.so"))

    assert with_blas.environment["LD_PRELOAD"] == "/lib/blas.so"
    assert "LD_PRELOAD" not in mlx_lm_side("b", "/m", blas=None).environment


def test_prompts_have_exactly_their_tokens_and_share_their_prefix() -> None:
    def encode(text: str) -> list[str]:
        return [word[at : at + 3] for word in text.split() for at in range(0, len(word), 3)]

    prompts = Prompts(encode, ["one", "two", "seven", "elephants"])
    trace = Trace("t", (Ask(7, 1, shared=20), Ask(1, 1, shared=20)))
    first, second = prompts.of(trace, 1, 0)

    assert [len(encode(text)) for text in (first, second)] == [27, 21]
    assert encode(first)[:20] == encode(second)[:20]
    assert [first, second] == prompts.of(trace, 1, 0)
    assert first != prompts.of(trace, 1, 1)[0]
    with pytest.raises(ValueError, match="is one token"):
        Prompts(encode, ["seven"])
    assert words_of("The old man, the SEA an x1") == ["man", "old", "the"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"data: [DONE]\n", None),
        (b": keepalive 3/4\n", None),
        (b"\n", None),
        (b'data: {"choices": [{"text": "a"}]}\n', {"choices": [{"text": "a"}]}),
    ],
)
def test_server_sent_events(line: bytes, expected: object) -> None:
    assert parse(line) == expected


def test_an_error_in_a_stream_is_raised() -> None:
    with pytest.raises(RuntimeError, match="too long"):
        parse(b'data: {"error": "too long"}\n')


def test_the_copied_model_has_no_end_of_text_token(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = {"eos_token_id": [2, 0], "hidden_size": 8}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    (source / "tokenizer.json").write_text("{}")
    twin.make(source, tmp_path / "twin")

    assert json.loads((tmp_path / "twin/config.json").read_text()) == {"hidden_size": 8}
    assert json.loads((tmp_path / "twin/tokenizer_config.json").read_text()) == {"eos_token": None}
    assert (tmp_path / "twin/tokenizer.json").resolve() == source / "tokenizer.json"
    assert json.loads((source / "config.json").read_text()) == config


def fake_process(proc: Path, pid: int, children: str, ticks: int, peak_kb: int) -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (task / "children").write_text(children)
    fields = " ".join(["S", *["0"] * 10, str(ticks), "1", *["0"] * 30])
    (proc / str(pid) / "stat").write_text(f"{pid} (a ) b) {fields}\n")
    (proc / str(pid) / "status").write_text(f"Name:\tx\nVmHWM:\t  {peak_kb} kB\n")
    (proc / str(pid) / "cmdline").write_text("/usr/bin/python\0-m\0kvd.worker\x009\0")


def test_processes_are_read_from_proc(tmp_path: Path) -> None:
    fake_process(tmp_path, 10, "11 ", 49, 100)
    fake_process(tmp_path, 11, "", 99, 200)

    assert processes.tree(10, tmp_path) == [10, 11]
    assert processes.tree(12, tmp_path) == []
    second = processes.read([10, 11, 12], tmp_path)[1]
    assert second.name == "kvd.worker"
    assert second.cpu_s == pytest.approx(100 / os.sysconf("SC_CLK_TCK"))
    assert second.peak_bytes == 200 * 1024
    processes.reset_peaks([11, 12], tmp_path)
    assert (tmp_path / "11/clear_refs").read_text() == "5"


_READS = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
    sum(view[::4096])
    print(flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="Linux only")
def test_pages_that_two_processes_share_are_counted_once(tmp_path: Path) -> None:
    for name in ("same", "other"):
        (tmp_path / name).write_bytes(b"x" * (1 << 20))
    with contextlib.ExitStack() as running:
        readers = []
        for name in ("same", "same", "other"):
            command = [sys.executable, "-S", "-c", _READS, str(tmp_path / name)]
            readers.append(running.enter_context(Popen(command, stdin=PIPE, stdout=PIPE)))
            assert readers[-1].stdout.readline() == b"\n"  # type: ignore[union-attr]
        first, second, third = (reader.pid for reader in readers)
        libraries = processes.counted_again([first, third])
        both = processes.counted_again([first, second])
        resident = sum(one.peak_bytes for one in processes.read([first, second, third]))

        assert processes.counted_again([first]) == 0
        assert libraries > 1 << 20
        assert both - libraries == pytest.approx(1 << 20, abs=256 << 10)
        assert both + libraries <= processes.counted_again([first, second, third]) < resident


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Scripted:
    """A driver whose streams get one token in each pass of the event loop."""

    path = ""

    async def ask(self, prompt: str, output: int, stream: Stream) -> None:
        for _ in range(output):
            await asyncio.sleep(0)
            stream.arrived(0.0)

    async def close(self) -> None: ...


@pytest.mark.parametrize(("concurrency", "marks"), [(None, 2), (1, 0)])
async def test_the_time_in_which_all_streams_run_is_marked(
    concurrency: int | None, marks: int
) -> None:
    seen: list[int] = []
    trace = Trace("two", (Ask(1, 4), Ask(1, 9)), concurrency)
    streams = await play(trace, ["", ""], Scripted(), seen.append)

    assert [one.shown for one in streams] == [4, 9]
    assert len(seen) == marks
    assert seen == sorted(seen)


@pytest.mark.process
async def test_the_harness_on_a_fake_engine(home: Home, tmp_path: Path) -> None:
    trace = Trace(
        "small",
        (Ask(20, 12, shared=5), Ask(30, 8, shared=5, at_s=0.05), Ask(400, 2, shared=5, behind=4)),
        concurrency=3,
    )
    prompts = Prompts(lambda text: list(text.encode()), [""])  # the fake's tokens are bytes
    side = kvd_side("fake", "k8v8", "fake:tps=400", home.root, fake=True)
    async with Fleet([side], tmp_path) as servers:
        pids = servers["fake"].pids()
        assert servers["fake"].driver.path == "fake, rows share a pass"
        streams = await play(trace, prompts.of(trace, 1, 0), servers["fake"].driver)
        readings = processes.read(pids)
    check_fair(trace, streams)
    found = summarize(trace, streams)
    results = {"small": {"fake": [found]}}

    assert found.tokens == 22
    assert streams[2].sent >= streams[0].arrivals[3][0]
    assert all(0 < value < 60 for value in (found.wall_s, found.ttft_p50, found.late_ttft))
    assert {one.name for one in readings} == {"kvd.daemon.serve", "kvd.worker"}
    assert all(gone(pid) for pid in pids)
    assert trace_table("small", results["small"]).row_count == 1
    plot(results, tmp_path / "plot.svg")
    text = json.dumps(as_json({}, results), allow_nan=False)
    assert json.loads(text)["traces"]["small"]["fake"]["median"]["tokens"] == 22


@pytest.mark.process
async def test_a_server_that_does_not_start_leaves_no_process(home: Home, tmp_path: Path) -> None:
    good = kvd_side("good", "k8v8", "fake:tps=400", home.root, fake=True)
    bad = kvd_side("bad", "k8v8", "nothing", home.root.parent / "b", fake=True)
    fleet = Fleet([good, bad], tmp_path)
    with pytest.raises(RuntimeError, match=r"bad cannot load the model: .*nothing"):
        await fleet.__aenter__()

    assert fleet.pids() == []
