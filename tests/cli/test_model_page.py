"""The page of `kvctl status MODEL`: layers, KV settings, prefix cache and kernels of one model."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from kvd.cli import model_page, status_page
from protocol.embedding import EmbeddingInfo
from protocol.errors import ErrorInfo
from protocol.kv import KVSpec
from protocol.types import (
    BitsByLayer,
    ChatAbilities,
    FastPath,
    FusedAttention,
    KVPart,
    ModelStatus,
    PrefixUse,
    RankStatus,
)
from tests.cli.stub import INFO, MODEL, daemon_status

FULL = KVPart(
    kind="full", layers=6, path="pages", scheme="k8v8", batched=True, bytes_per_token=1632
)
WINDOW = KVPart(
    kind="window 8192 keep 4",
    layers=24,
    path="dequantize-on-read",
    scheme="k4g32v4g128",
    batched=False,
    reason="the model takes the offset of its cache as one number",
    bound_bytes=123_000_000,
)
STATE = KVPart(
    kind="recurrent", layers=2, path="state", scheme="dense", batched=True, bound_bytes=12_000
)
SETTINGS = KVSpec(
    8,
    8,
    floors={-1: "k8v8", 0: "k16v16"},
    quantized_kv_start=512,
    max_kv_size=8192,
)
MIXED = msgspec.structs.replace(
    MODEL, kv=SETTINGS, info=msgspec.structs.replace(INFO, kv=[FULL, WINDOW, STATE])
)


def shown(value: ModelStatus, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(model_page.page(value))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_the_layers_fit_the_terminal_with_one_line_each(width: int):
    text = shown(MIXED, width)
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("LAYERS")) :]
    cells = [" ".join(line.split()) for line in table]
    assert cells == [
        "LAYERS CACHE SCHEME ROWS BYTES",
        "6 × full pages k8v8 batched 1.6 KiB/token",  # noqa: RUF001
        "24 × window 8192 keep 4 dequantize-on-read k4g32v4g128 one 117 MiB/row",  # noqa: RUF001
        "2 × recurrent state dense batched 11.7 KiB/row",  # noqa: RUF001
        "window 8192 keep 4: the model takes the offset of its cache as one number",
    ]


def test_fast_paths_that_are_not_used_are_shown_with_the_reason():
    paths = [
        FastPath(name="compiled steps", used=True),
        FastPath(name="whole layers", used=False, cause="model", reason="a norm is LayerNorm"),
        FastPath(name="fused attention", used=False, cause="speed", reason="shown elsewhere"),
    ]
    info = msgspec.structs.replace(INFO, paths=paths)
    text = shown(msgspec.structs.replace(MODEL, info=info), 80)
    assert "no whole layers: a norm is LayerNorm" in text
    assert "compiled steps" not in text
    assert "shown elsewhere" not in text


def test_all_kv_settings_are_shown():
    text = " ".join(shown(MIXED, 80).split())
    assert (
        "k8v8, may step down to k8v4, k4v4; layer 0 not below k16v16; layer -1 not below k8v8; "
        "dense until 512 tokens; at most 8192 tokens, including the first 4; "
        "prefix cache up to a quarter of the budget"
    ) in text
    lowest = msgspec.structs.replace(
        MODEL, kv=KVSpec(4, 4, max_kv_size=512, keep=0, prefix_cache=0)
    )
    lines = [line.strip() for line in shown(lowest, 80).splitlines()]
    assert "KV cache   k4v4, never steps down; at most 512 tokens" in lines


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            MODEL.stats.prefix,
            ("3320 of 4000 tokens found in the cache (83%); 3 checkpoints in 3.0 MiB, 1 evicted"),
        ),
        (
            PrefixUse(queries=1, query_tokens=300, checkpoints=1, held=1 << 20),
            "0 of 300 tokens found in the cache (0%); 1 checkpoint in 1.0 MiB",
        ),
        (
            PrefixUse(query_tokens=1000, hit_tokens=256, disk_tokens=512),
            "256 of 1000 tokens found in the cache and 512 on disk (77%); 0 checkpoints in 0 B",
        ),
        (PrefixUse(), "0 of 0 tokens found in the cache; 0 checkpoints in 0 B"),
    ],
)
def test_the_prefix_cache_s_hits_are_shown(use: PrefixUse, text: str):
    stats = msgspec.structs.replace(MODEL.stats, prefix=use)
    value = msgspec.structs.replace(MODEL, stats=stats)
    assert f"prompts {text} " in " ".join(shown(value, 80).split()) + " "
    without = msgspec.structs.replace(value, kv=KVSpec(prefix_cache=0))
    assert "found in the cache" not in shown(without, 80)


def test_an_embedding_model_shows_its_pooling():
    assert "embeddings" not in shown(MODEL, 80)
    embedding = EmbeddingInfo(pooling="last_token", dimensions=1024)
    value = msgspec.structs.replace(MODEL, info=msgspec.structs.replace(INFO, embedding=embedding))
    assert "embeddings 1024 dimensions, pooled by the last token" in " ".join(
        shown(value, 80).split()
    )


def test_a_calibrated_model_shows_its_remaining_levels_and_quality_floor():
    info = msgspec.structs.replace(INFO, kv_schemes=["k8v8", "k8v4"], kv_calibrated="k8v4")
    text = " ".join(shown(msgspec.structs.replace(MODEL, info=info), 80).split())
    assert "k8v8, may step down to k8v4; quality floor k8v4" in text


def test_a_model_with_bits_by_layer_shows_them():
    mix = ["k4v3", "k8v4", "k4v3"]
    info = msgspec.structs.replace(INFO, kv_schemes=["k8v8", "k4v4"], kv_mixes={"k4v4": mix})
    text = " ".join(shown(msgspec.structs.replace(MODEL, info=info), 80).split())
    assert "may step down to k4v4; k4v4 as 2 k4v3, k8v4 by layer" in text
    info = msgspec.structs.replace(info, kv_bits=BitsByLayer(source="probe", reason="estimated"))
    text = " ".join(shown(msgspec.structs.replace(MODEL, info=info), 80).split())
    assert "k8v4 by layer; bits by layer from probe (estimated)" in text
    even = {"k4v4": ["k5v3", "k5v3"]}
    bits = BitsByLayer(source="uniform", reason="off")
    info = msgspec.structs.replace(info, kv_bits=bits, kv_mixes=even)
    text = " ".join(shown(msgspec.structs.replace(MODEL, info=info), 80).split())
    assert "; k4v4 as k5v3; equal bits in all layers (off)" in text
    assert "bits by layer" not in text


def test_the_page_size_is_shown_if_the_model_has_pages():
    bounded = msgspec.structs.replace(MODEL, info=msgspec.structs.replace(INFO, page_bytes=0))
    assert "values per token; a page of 64 tokens: 102 KiB" in shown(MODEL, 80)
    assert "a page of" not in shown(bounded, 80)


def test_a_model_without_a_worker_shows_what_is_known():
    failed = ModelStatus(
        name="m", source="/models/m", state="failed", error=ErrorInfo("x", "3 crashes [a]")
    )
    text = shown(failed, 80)
    for words in ("m  failed", "/models/m", "k8v8", "3 crashes [a]"):
        assert words in text


def test_status_points_to_the_model_page_if_layers_have_no_pages():
    console = Console(width=80, file=io.StringIO(), highlight=False)
    console.print(status_page.status(daemon_status(MIXED), 80))
    hint = "demo: 24 of 32 layers are not in batched pages; `kvctl status demo` shows why"
    assert hint in console.file.getvalue()
    console = Console(width=80, file=io.StringIO(), highlight=False)
    console.print(status_page.status(daemon_status(MODEL), 80))
    assert "shows why" not in console.file.getvalue()


def test_the_use_of_kernels_is_shown():
    def text(**what: object) -> str:
        info = msgspec.structs.replace(INFO, fused=FusedAttention(**what))  # type: ignore[arg-type]
        return " ".join(shown(msgspec.structs.replace(MODEL, info=info), 120).split())

    timed = {"call_ms": 0.1234, "reference_ms": 1.4}
    assert "kernels, 0.12 ms per layer instead of 1.4 ms" in text(used=True, **timed)
    assert "without kernels: switched off KV cache" in text(used=False, reason="switched off")


@pytest.mark.parametrize(
    ("chat", "lines"),
    [
        (None, ["chat no chat template: prompts only"]),
        (ChatAbilities(), ["chat no tool calls; late system messages as notes of the user"]),
        (
            ChatAbilities(
                tools="harmony",
                reasoning="<|channel|>analysis",
                efforts=["low", "high"],
                late_system=True,
            ),
            [
                "chat tool calls as harmony, results as notes of the user",
                "reasoning after <|channel|>analysis, efforts low, high",
            ],
        ),
        (
            ChatAbilities(
                tools="json in <tool_call>",
                tool_results=True,
                reasoning="<think>",
                reasoning_switch=True,
                late_system=True,
            ),
            [
                "chat tool calls as json in <tool_call>",
                "reasoning after <think>, can be switched off",
            ],
        ),
        (
            ChatAbilities(
                reasoning="<think>",
                reasoning_switch=True,
                reasons_by_default=False,
                late_system=True,
            ),
            ["chat no tool calls", "reasoning after <think>, off unless a request turns it on"],
        ),
    ],
)
def test_abilities_in_a_conversation(chat: ChatAbilities | None, lines: list[str]):
    value = msgspec.structs.replace(MODEL, info=msgspec.structs.replace(INFO, chat=chat))
    assert " ".join(lines) in " ".join(shown(value, 120).split())


def test_the_ranks_of_a_model_are_shown():
    ranks = [
        RankStatus(pid=4242, state="running", footprint_bytes=3 * 2**30),
        RankStatus(pid=4243, state="starting"),
    ]
    text = shown(msgspec.structs.replace(MODEL, ranks=ranks), 100)
    first, second = (line for line in text.splitlines() if line.startswith("rank"))
    assert "pid 4242, running, 3.0 GiB" in first
    assert "pid 4243, starting" in second
    assert "rank" not in shown(MODEL, 100)
