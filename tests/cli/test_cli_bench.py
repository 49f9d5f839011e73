"""`kvctl bench`: its page, the memory check, and runs against a daemon and other servers."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvd.bench.measure import Stream, summarize_stopped
from kvd.bench.player import play
from kvd.bench.traces import TRACES, Ask, Trace, build
from kvd.cli import bench_page, bench_sides
from kvd.cli.bench import FULL, QUICK, choose
from kvd.cli.bench_room import obstacles, rows
from protocol.errors import InsufficientMemory, InvalidRequest, UnknownModel
from protocol.forecast import Forecast, LevelCost, ReclaimStep
from protocol.types import DaemonStatus, HostMemory, ModelStatus
from tests.process.helpers import Daemon, configured

MIB = 2**20


def result(*sides: str, stopped: tuple[str, str] | None = None) -> dict[str, Any]:
    def median(factor: float) -> dict[str, Any]:
        found = dict.fromkeys(("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"), 0.0123 * factor)
        return {"median": {**found, "tok_s": 1234.0 / factor, "during_p99": None}}

    measured = {side: median(number) for number, side in enumerate(sides, 1)}
    return {
        "model": "qwen",
        "kv_scheme": "k8v8",
        "attention_path": "",
        "machine": "Linux x86_64, 2 cores",
        "servers": dict.fromkeys(sides, "a server"),
        "traces": {"steady": measured, "long": measured},
        "stopped": [stopped] if stopped else [],
        "notes": ["shared is left out: no room"],
    }


def shown(value: dict[str, Any], width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    with console.capture() as capture:
        console.print(bench_page.page(value, width))
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_page_fits_its_width_and_has_every_server(width: int):
    text = shown(result("kvd", "mlx-lm", "llama", stopped=("steady", "llama")), width)

    assert max(map(len, text.splitlines())) <= width
    assert "411*" in text  # 1234 / 3
    assert "stopped at the time limit" in text
    assert text.count("shared is left out") == 1
    panels = [line for line in text.splitlines() if "less is better" in line]
    assert ("more is better" in panels[0]) == (width >= 120)
    for title in ("TRACE", "SERVER", "TOK/S", "FIRST TOKEN ms"):
        assert title in text
    assert "CACHED" not in text  # no server reported it


@given(st.floats(0, 1), st.integers(8, 60))
def test_a_bar_is_as_long_as_its_share(share: float, cells: int):
    drawn = bench_page.bar(share, cells)

    assert len(drawn) <= cells
    assert bool(drawn) == (share > 0)
    assert abs(len(drawn.rstrip("▏▎▍▌▋▊▉")) - share * cells) <= 1


def forecast(verdict: str, *methods: str, context: int = 16384) -> Forecast:
    level = LevelCost(
        scheme="k8v8", token_bytes=1.0, row_bytes=MIB, total_bytes=9 * MIB, max_rows=9
    )
    return Forecast(
        model="m", source="m", state="ready", measured=True, context=context, rows=1,
        weights_bytes=0, base_bytes=0, idle_bytes=0, levels=[level], budget_bytes=300 * MIB,
        available_bytes=0, held_bytes=0, missing_bytes=7 * MIB, shortfall_bytes=5 * MIB,
        steps=[ReclaimStep(method=method, model="small", nbytes=MIB) for method in methods],
        verdict=verdict,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "make_room", "reason"),
    [
        (forecast("fits"), False, None),
        (forecast("makes_room", "spare"), False, None),
        (forecast("makes_room", "spare", "idle"), False, "unload small, which is idle; --make-r"),
        (forecast("makes_room", "prefixes"), False, "drop cached prompts of small"),
        (forecast("makes_room", "precision"), False, "step rows of small down to level 0"),
        (forecast("makes_room", "idle"), True, None),
        (forecast("waits"), True, "5.0 MiB of the budget of 300 MiB are missing"),
        (forecast("never"), True, "5.0 MiB of the budget"),
        (forecast("fits", context=300), False, "a request has 328 tokens, and the model's cont"),
    ],
)
def test_a_trace_that_would_take_memory_from_others_is_left_out(found, make_room, reason):
    asked: list[tuple[int, int]] = []

    def explain(rows: int, context: int) -> Forecast:
        asked.append((rows, context))
        return found

    left_out = obstacles([build("steady", 1, 0)], explain, make_room=make_room)

    assert list(left_out) == (["steady"] if reason else [])
    if reason:
        assert reason in left_out["steady"]
    assert {(1, 328)} <= set(asked) <= {(1, 328), (8, 328)}


@pytest.mark.parametrize("name", list(TRACES))
def test_the_rows_of_a_trace_hold_all_of_its_tokens_that_run_at_once(name: str):
    trace = build(name, 1, 0)
    count, context = rows(trace)

    assert count <= (trace.concurrency or len(trace.asks))
    assert context * len(trace.asks) >= trace.prompt_tokens + trace.output_tokens


def test_the_traces_exist():
    assert {*QUICK, *FULL} <= TRACES.keys()


def status(*models: tuple[str, str], unloaded: tuple[str, ...] = ()) -> DaemonStatus:
    return DaemonStatus(
        version="1", pid=1, uptime_s=1.0, home="/h", state="serving", budget_bytes=1,
        granted_bytes=0, footprint_bytes=0, host=HostMemory(total=1, available=1),
        models=[ModelStatus(name=name, source="demo", state=state) for name, state in models],  # type: ignore[arg-type]
        unloaded=list(unloaded),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("models", "named", "name", "loaded_here"),
    [
        ([("a", "ready")], None, "a", False),
        ([("a", "ready"), ("b", "ready")], "b", "b", False),
        ([], None, "bench-demo", True),
        ([], "demo", "bench-demo", True),
        ([], "mlx-community/Qwen3-0.6B-4bit", "bench-Qwen3-0.6B-4bit", True),
        ([], "idle", "idle", False),
    ],
)
def test_the_model_is_the_loaded_one_or_a_source_under_another_name(
    models, named, name, loaded_here
):
    found = choose(status(*models, unloaded=("idle",)), named)

    assert (found.name, found.loaded_here) == (name, loaded_here)


@pytest.mark.parametrize(
    ("models", "named", "message"),
    [
        ([("a", "ready"), ("b", "ready")], None, "several models are loaded; name one of a, b"),
        ([("a", "failed")], "a", "a is failed"),
        ([("a", "loading")], None, "a is loading; wait until it is ready"),
        ([("alpha", "ready")], "alpa", "did you mean 'alpha'"),
    ],
)
def test_a_model_that_cannot_be_measured(models, named, message):
    with pytest.raises(UnknownModel, match=message):
        choose(status(*models), named)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", "cannot compare with 'vllm'; give mlx-lm"),
        ("llama", "llama=FILE.gguf"),
        ("llama=/no/such.gguf", "there is no file /no/such.gguf"),
        ("ftp://x", "cannot compare"),
    ],
)
def test_a_server_that_cannot_be_measured(text, message):
    with pytest.raises(InvalidRequest, match=message):
        bench_sides.check([text])


def test_a_second_copy_of_a_model_that_does_not_fit_beside_kvd_is_not_started(tmp_path: Path):
    with pytest.raises(InsufficientMemory, match="mlx-lm needs about 13"):
        bench_sides.make(["mlx-lm"], "demo", tmp_path, [build("alone", 1, 0)], free_bytes=MIB)
    twice = ["http://127.0.0.1:1", "http://127.0.0.1:1/v1"]
    with pytest.raises(InvalidRequest, match="same name"):
        bench_sides.make(twice, "demo", tmp_path, [build("alone", 1, 0)], free_bytes=MIB)


class Slow:
    """A driver whose first stream ends, whose second one hangs after three tokens."""

    path = ""

    async def ask(self, prompt: str, output: int, stream: Stream) -> None:
        for _ in range(3):
            stream.arrived(stream.sent + 0.001)
        if prompt == "hangs":
            await asyncio.Event().wait()
        stream.output_tokens = 3

    async def close(self) -> None: ...


async def test_a_run_that_is_stopped_counts_what_arrived():
    trace = Trace("t", (Ask(1, 3), Ask(1, 9), Ask(1, 9, behind=8)))
    streams = await play(trace, ["ends", "hangs", "never sent"], Slow(), limit_s=0.05)
    found = summarize_stopped(trace, streams, 2.0)

    assert [stream.finished for stream in streams] == [True, False, False]
    assert (found.tokens, found.tok_s) == (6, 3.0)
    assert summarize_stopped(trace, [Stream(), Stream(), Stream()], 2.0).tok_s == 0.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with configured("[http]\nport = 0\n") as served:
        served.start("--fake")
        served.load("fake:tps=2000", "quick")
        yield served


@pytest.mark.process
def test_a_daemon_beside_another_server(daemon: Daemon):
    """The other server is the same daemon over HTTP."""
    with daemon.client() as kvd:
        (address,) = (one for one in kvd.status().http if one.startswith("http:"))
    done = daemon.kvctl(
        *("bench", "--trace", "alone", "--trace", "steady", "--seconds", "10", "--json"),
        *("--against", f"again={address}#quick"),
    )
    found = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert list(found["traces"]) == ["alone", "steady"]
    for trace, tokens in (("alone", 128), ("steady", 8 * 128)):
        assert set(found["traces"][trace]) == {"kvd", "again"}
        for side in found["traces"][trace].values():
            assert [run["tokens"] for run in side["runs"]] == [tokens]
            assert 0 < side["median"]["ttft_p50"] < 10
    assert found["stopped"] == []
    # The fake engine has no formulas for its memory.
    assert ["forecast" in note for note in found["notes"]] == [True]
    with daemon.client() as kvd:
        assert [one.name for one in kvd.status().models] == ["quick"]


LLAMA = """\
    import http.server, json, sys, time
    assert sys.argv[1:7:2] == ["--model", "--host", "--port"]
    assert sys.argv[7:] == ["--parallel", "1", "--ctx-size", "392"]
    started = time.monotonic()
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503 if time.monotonic() < started + 0.3 else 200)
            self.end_headers()
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["ignore_eos"]
            self.send_response(200)
            self.end_headers()
            for number in range(asked["max_tokens"]):
                self.wfile.write(b'data: {"choices": [{"text": "a"}]}\\n\\n')
            usage = {"prompt_tokens": 7, "completion_tokens": asked["max_tokens"]}
            self.wfile.write(b"data: " + json.dumps({"usage": usage}).encode() + b"\\n\\n")
        def log_message(self, *_): pass
    http.server.ThreadingHTTPServer((sys.argv[4], int(sys.argv[6])), Handler).serve_forever()
"""


@pytest.mark.process
def test_llama_server_is_started_and_ended(daemon: Daemon, tmp_path: Path, monkeypatch):
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{textwrap.dedent(LLAMA)}")
    program.chmod(0o755)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done = daemon.kvctl(
        *("bench", "--trace", "alone", "--seconds", "10", "--json"),
        *("--against", f"llama={tmp_path}/m.gguf"),
    )
    found = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert found["traces"]["alone"]["llama"]["runs"][0]["tokens"] == 128
    assert found["notes"][1:] == ["llama has another tokenizer, so its prompts differ in tokens"]
    listed = Path("/proc").glob("[0-9]*/cmdline")
    assert not [one for one in listed if str(program).encode() in _read(one)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.process
def test_a_url_without_a_server_and_a_model_without_a_name(daemon: Daemon):
    done = daemon.kvctl("bench", "--trace", "alone", "--against", "http://127.0.0.1:9")
    assert done.returncode == 6
    assert "127.0.0.1:9: nothing answers at http://127.0.0.1:9" in done.stderr
    done = daemon.kvctl("bench", "quik")
    assert "did you mean 'quick'" in done.stderr


@pytest.mark.process
def test_without_a_daemon(kvctl: Callable[..., tuple[int, str, str]]):
    code, _, errors = kvctl("bench")
    assert code == 3
    assert "kvd serve" in errors
