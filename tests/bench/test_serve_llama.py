"""`bench/llama` and its sides in `bench/serve`: the model's file, settings, greedy texts, a run."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

mx = pytest.importorskip("mlx.core")

from bench.llama import gguf, settings  # noqa: E402 - needs MLX
from bench.serve import __main__ as program  # noqa: E402
from bench.serve import greedy  # noqa: E402
from kvd import demo  # noqa: E402
from kvd.bench.measure import Stream, Unfair  # noqa: E402
from kvd.bench.traces import build  # noqa: E402
from tools.pages import llama as llama_page  # noqa: E402

pytestmark = pytest.mark.mlx
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and metadata of the embedded model's file."""
    file = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    gguf.write(demo.path(), file)
    return mx.load(str(file), return_metadata=True)


def test_the_file_has_every_weight_in_half_precision(written) -> None:
    weights, _ = written
    stored = mx.load(str(demo.path() / "model.safetensors"))

    assert len(weights) == len(stored)
    for name, array in stored.items():
        found = weights[gguf.tensor_name(name)]
        assert found.dtype == (mx.float16 if array.ndim > 1 else mx.float32)
        assert mx.array_equal(found, array.astype(mx.float16).astype(found.dtype)).item()
    assert (
        gguf.tensor_name("model.layers.11.self_attn.k_norm.weight") == "blk.11.attn_k_norm.weight"
    )
    with pytest.raises(ValueError, match=r"it has a weight model.layers.0.mlp.experts.weight"):
        gguf.tensor_name("model.layers.0.mlp.experts.weight")


def test_the_file_describes_the_model(written) -> None:
    _, metadata = written
    config = json.loads((demo.path() / "config.json").read_text())

    assert metadata["general.architecture"] == "qwen3"
    assert metadata["qwen3.block_count"].item() == config["num_hidden_layers"]
    assert metadata["qwen3.attention.key_length"].item() == config["head_dim"]
    assert metadata["qwen3.rope.freq_base"].item() == config["rope_theta"]
    assert metadata["qwen3.context_length"].dtype == mx.uint32


def test_no_token_of_the_file_ends_a_text(written) -> None:
    _, metadata = written
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = json.loads((demo.path() / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]

    assert len(tokens) == len(set(tokens)) == 4096
    assert [tokens[at] for at in range(3)] == ["[special_0]", "[special_1]", "[special_2]"]
    assert [tokens[at] for at in range(3, 4096)] == [
        {number: name for name, number in ids.items()}.get(at, tokens[at]) for at in range(3, 4096)
    ]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [1] * 4096
    assert tokens[metadata["tokenizer.ggml.eos_token_id"].item()] == "\u00ff"
    assert len(metadata["tokenizer.ggml.merges"]) == len(tokenizer["model"]["merges"])


def test_a_model_of_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="of the type 'llama'"):
        gguf.write(tmp_path, tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="byte-level"):
        gguf.vocabulary({"model": {"vocab": {"a": 0}}}, 1)


def test_every_setting_is_a_side_whose_slots_hold_the_longest_request() -> None:
    traces = [build(name, 1, 0) for name in ("steady", "long")]
    made = settings.sides(Path("/bin/llama-server"), Path("/m.gguf"), traces)

    assert [side.name for side in made] == list(settings.SETTINGS)
    assert settings.QUANTIZED in settings.SETTINGS
    for side in made:
        context = int(side.command[side.command.index("--ctx-size") + 1])
        assert context >= 8 * (6000 + 8)
        assert context % (8 * 256) == 0
        quantized = "q8_0" in side.command
        assert quantized == ("q8_0" in side.name)
        assert ("256" in side.command) == ("ub256" in side.name)
        attention = side.command[side.command.index("--flash-attn") + 1]
        assert attention == ("on" if " fa" in side.name else "off")
        assert attention == "on" or not quantized
        assert side.endless
    assert len({side.url for side in made}) == len(made)


def test_a_program_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x does not run .* bench/llama/build.sh"):
        settings.version(tmp_path / "x")


def test_the_build_script_asks_for_a_folder() -> None:
    script = ROOT / "bench" / "llama" / "build.sh"
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "usage: bench/llama/build.sh FOLDER" in done.stderr


class Saying:
    """A driver that says the same after every prompt, two characters a token."""

    path = ""

    def __init__(self, text: str) -> None:
        self._text = text

    async def ask(self, prompt: str, output: int, stream: Stream) -> None:
        await asyncio.sleep(0)
        for at in range(0, 2 * output, 2):
            stream.arrived(0.0, 1, self._text[at : at + 2])

    async def close(self) -> None: ...


WHOLE = "ab" * greedy.TOKENS


@pytest.mark.parametrize(("equal", "passes"), [(256, True), (64, True), (63, False), (0, False)])
async def test_greedy_texts_must_begin_alike(equal: int, passes: bool) -> None:
    other = WHOLE[:equal] + "x" * (256 - equal)
    servers: Any = {
        "kvd": SimpleNamespace(driver=Saying(WHOLE)),
        "llama": SimpleNamespace(driver=Saying(other)),
    }
    if not passes:
        with pytest.raises(Unfair, match="llama continues 'To open a file,' with"):
            await greedy.check(servers, "kvd", ["llama"])
        return
    found = (await greedy.check(servers, "kvd", ["llama"]))["llama"]
    assert found.equal == (equal,) * 3
    assert found.whole == (256,) * 3


async def test_a_text_that_ends_early_is_another_text() -> None:
    servers: Any = {
        "kvd": SimpleNamespace(driver=Saying(WHOLE)),
        "llama": SimpleNamespace(driver=Saying(WHOLE[:40])),
    }
    with pytest.raises(Unfair, match="the weights are not the same"):
        await greedy.check(servers, "kvd", ["llama"])


def test_the_page_has_a_row_for_each_trace_that_both_servers_ran() -> None:
    ratios = {
        name: {"median": value}
        for name, value in (("tok_s", 1.25), ("ttft_p50", 0.5), ("itl_p99", 2.0), ("peak_bytes", 1))
    }
    sides = {name: {"median": {"tok_s": 99.6}} for name in ("kvd k8v8", "llama f16 fa")}
    found = {
        "traces": {"steady": sides, "alone": {"kvd k8v8": sides["kvd k8v8"]}},
        "best_llama": {"steady": "llama f16 fa", "alone": None},
        "ratios": {"steady": {"kvd k8v8 / best llama": ratios}},
    }
    rate = "100\u00a0tok/s"

    assert list(llama_page.rows(found)) == [
        ("`steady`", rate, rate, "f16 fa", "1.25", "0.50", "2.00", "1.00")
    ]


FAKE = """\
    import http.server, json, sys
    from tokenizers import Tokenizer
    if sys.argv[1:] == ["--version"]:
        raise SystemExit(print("version: 1 (fake)"))
    assert open(sys.argv[2], "rb").read(4) == b"GGUF"
    tokenizer = Tokenizer.from_file(TOKENIZER)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert "ignore_eos" not in asked
            self.send_response(200)
            self.end_headers()
            for number in range(asked["max_tokens"]):
                self.wfile.write(b'data: {"choices": [{"text": "a"}]}\\n\\n')
            count = len(tokenizer.encode(asked["prompt"], add_special_tokens=False).ids)
            usage = {"prompt_tokens": count, "completion_tokens": asked["max_tokens"]}
            self.wfile.write(b"data: " + json.dumps({"usage": usage}).encode() + b"\\n\\n")
        def log_message(self, *_): pass
    http.server.ThreadingHTTPServer((sys.argv[4], int(sys.argv[6])), Handler).serve_forever()
"""


@pytest.mark.process
@pytest.mark.slow
async def test_a_comparison_of_settings_of_llama_server(tmp_path: Path) -> None:
    """From the options to the JSON file, with a program that answers as llama-server does."""
    server = tmp_path / "llama-server"
    tokenizer = repr(str(demo.path() / "tokenizer.json"))
    server.write_text(
        f"#!{sys.executable}\n{textwrap.dedent(FAKE).replace('TOKENIZER', tokenizer)}"
    )
    server.chmod(0o755)
    options = argparse.Namespace(
        model="demo", traces=["alone", "alone"], sides=["llama f16", "llama q8_0 fa"],
        llama=server, url=[], runs=2, seed=1, seconds=math.inf, quiet=None, timeout=60.0,
        plot=tmp_path / "plot.svg", prefix_cache=None,
    )  # fmt: skip
    screen = io.StringIO()
    found = await program.compare(options, Console(file=screen, width=180))
    found = json.loads(json.dumps(found, allow_nan=False))

    assert list(found["traces"]) == ["alone", "alone #2"]
    for sides in found["traces"].values():
        assert [run["tokens"] for side in sides.values() for run in side["runs"]] == [128] * 4
        assert all(run["peak_bytes"] > 1e6 for side in sides.values() for run in side["runs"])
    assert set(found["played_again"]["alone #2"]) == {"llama f16", "llama q8_0 fa"}
    assert found["best_llama"]["alone"] in {"llama f16", "llama q8_0 fa"}
    assert found["versions"]["llama-server"] == "version: 1 (fake)"
    assert "first runs" in screen.getvalue()
    assert len(found["details"]) == 8
