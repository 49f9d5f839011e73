"""The limits of comparisons with other servers, on CPUs and on accelerators."""

from __future__ import annotations

from collections.abc import Sequence

from bench.llama import settings
from bench.serve.bars import Bar
from bench.serve.ratios import BEST_LLAMA
from bench.serve.rounds import plan
from bench.serve.sides import AS_STARTED, DENSE, PLAIN, PLAIN_8_BITS, QUANTIZED

_TOKENS_LLAMA = {"steady": 1.1, "shared": 1.5, "long": 1.5, "unequal": 1.2}
_TOKENS_ACCELERATED = {"steady": 2.5, "long": 2.5, "chats": 2.5, "heavy": 2.5}
_TOKENS_ACCELERATED_OTHERS = 1.8
_GAP_S = 0.015
AFTER_OTHERS = 0.97


def bars(traces: Sequence[str], *, accelerated: bool, llama: bool = False) -> list[Bar]:
    """Return the bars for a list of traces, in which a trace may be repeated."""
    found = _beside_mlx_lm_accelerated(traces) if accelerated else _beside_mlx_lm()
    if llama:
        found += _beside_llama()
    found += [
        Bar("peak memory", trace, "peak_bytes", ours, PLAIN, 1.0, at_least=False)
        for ours in (DENSE, QUANTIZED)
        for trace in dict.fromkeys(traces)
    ]
    return [bar for bar in found if bar.trace in traces] + _repeated(traces)


def _beside_mlx_lm() -> list[Bar]:
    found = [
        Bar("dense pages, throughput", "steady", "tok_s", DENSE, PLAIN, 2.2, at_least=True),
        Bar("K8V8, throughput", "steady", "tok_s", QUANTIZED, PLAIN, 1.6, at_least=True),
        Bar("K8V8 against 8 bits", "steady", "tok_s", QUANTIZED, PLAIN_8_BITS, 3.5, at_least=True),
        Bar("each as started", "steady", "tok_s", QUANTIZED, AS_STARTED, 4.0, at_least=True),
    ]
    for ours in (DENSE, QUANTIZED):
        found += [
            Bar("inter-token p99 while a long prompt comes", "long", "during_p99",
                ours, PLAIN, 0.33, at_least=False),
            Bar("first token p50, shared prompt", "shared", "ttft_p50",
                ours, PLAIN, 1.0, at_least=False),
        ]  # fmt: skip
    return found


def _beside_mlx_lm_accelerated(traces: Sequence[str]) -> list[Bar]:
    found: list[Bar] = []
    for trace in dict.fromkeys(traces):
        tokens = _TOKENS_ACCELERATED.get(trace, _TOKENS_ACCELERATED_OTHERS)
        found += [
            Bar("tokens in every run", trace, "tok_s", QUANTIZED, PLAIN, tokens,
                at_least=True, every_run=True),
            Bar("first token p50", trace, "ttft_p50", QUANTIZED, PLAIN, 1.0, at_least=False),
            Bar("first token p99", trace, "ttft_p99", QUANTIZED, PLAIN, 1.0, at_least=False),
            Bar("gap p99", trace, "itl_p99", QUANTIZED, PLAIN, 1.0, at_least=False),
        ]  # fmt: skip
    return found


def _beside_llama() -> list[Bar]:
    found = [Bar("gap p99, seconds", "steady", "itl_p99", QUANTIZED, "", _GAP_S, at_least=False)]
    for trace, tokens in _TOKENS_LLAMA.items():
        found += [
            Bar("tokens", trace, "tok_s", QUANTIZED, BEST_LLAMA, tokens, at_least=True),
            Bar("first token p50", trace, "ttft_p50", QUANTIZED, BEST_LLAMA, 1.0, at_least=False),
            Bar("peak memory, both with 8 bits", trace, "peak_bytes",
                QUANTIZED, settings.QUANTIZED, 1.2, at_least=False),
        ]  # fmt: skip
    return found


def _repeated(traces: Sequence[str]) -> list[Bar]:
    """Return the bars for traces that are played again after others."""
    return [
        Bar("tokens after other traces", one.title, "tok_s", ours, ours, AFTER_OTHERS,
            at_least=True, than=one.trace)
        for one in plan(traces, 1)
        if one.again
        for ours in (DENSE, QUANTIZED)
    ]  # fmt: skip
