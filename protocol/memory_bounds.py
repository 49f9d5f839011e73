"""Upper bounds of a worker's memory other than weights, interpreter and pages.

They follow from the model's configuration, for workers and for forecasts.
"""

from __future__ import annotations

from typing import Any

from protocol.pages import PAGE_TOKENS, TAIL_TOKENS

FREED_BYTES_ON_CPU = 2 * 1024 * 1024
"""Bytes of freed buffers that MLX keeps for reuse on the CPU.

Few, because malloc keeps freed memory as well, and joins adjacent blocks. With 128 MiB a worker
held 90 MB more, and decoding and prefill took more processor time.
"""
FREED_BYTES = 128 * 1024 * 1024
"""Bytes of freed buffers that MLX keeps for reuse on accelerators, where allocation is slow."""
FREED_BYTES_ON_CUDA = 512 * 1024 * 1024
"""Replaces `FREED_BYTES` on CUDA, where a larger scratch raises it. A pass has thousands of tokens,
and an allocation with its release takes 9 µs (H200), as long as a launch. With 512 MiB, 2 GiB and
8 GiB, eight prompts of 200 tokens and 64 steps took 371, 271 and 269 ms, and a prompt of 50,000
tokens 1.99, 1.98 and 1.82 s (Qwen3-0.6B's shape, medians of three)."""
MAX_TRACES = 64
"""Maximum number of compiled functions; the least recently used one is dropped first."""
TRACE_BYTES = 160 * 1024
"""Host memory of a compiled step's graph, per layer (measured: 140 KB)."""
NATIVE_TRACE_BYTES = 24 * 1024
"""Replaces `TRACE_BYTES` if attention is one operation of `kvd.worker.native` (measured: 19 KB)."""
CHUNK_COPIES = 8
"""Copies of the widest activation that exist at once in prefill (measured: 6)."""
PASS_TOKENS = 256
"""Maximum prompt tokens of a prefill pass, unless one chunk has more."""
CUDA_PASS_TOKENS = 4096
"""Replaces `PASS_TOKENS` on CUDA, where launching a pass takes 16 to 28 ms of host time."""
WIDE_PASS_TOKENS = 8192
"""Replaces `CUDA_PASS_TOKENS` for a model over several GPUs. Each GPU has a part of the work per
token, so longer passes take as long."""
KEPT_FROM = 4 * PAGE_TOKENS
"""Minimum tokens of a chunk for which a pass keeps the tail at its end. Chunks end at whole pages,
where tails have one page, so kept tails have at most a quarter of the pass's tokens."""
STAGE_COPIES = 2
"""Copies of a chunk's hidden states that exist between two stages of a prefill pass, while a decode
step runs: the sum of the layers so far, and its norm. The layer's queries, keys and values exist
too."""
LOGIT_COPIES = 3
"""Copies of a decode step's logits in float32 that exist at once, besides `SAMPLED_COPIES`
(measured: 1.8)."""
SAMPLED_AT_ONCE = 8 * 1024 * 1024
"""Bytes of logits in float32 that are sampled at once."""
SAMPLED_COPIES = 13
"""Copies of these bytes that exist at once. A step whose rows are all sampled at once takes 15.9
copies with penalties, bias, top-p, top-k and logprobs, 7.6 with top-k, top-p and logprobs, and 2 if
it is greedy (measured with vocabularies of 32,000 to 262,144)."""
COUNT_BYTES = 5
"""Bytes per row and token id that penalties hold between steps (`kvd.worker.sampling.edits`)."""
SCORED_AT_ONCE = 32
"""Prompt tokens scored at once (measured: 2.1 copies of their logits)."""
_DENSE_WIDTHS = (
    "intermediate_size",
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "shared_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_hidden_size",
    "n_inner",
)
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
ROW_SPLITS = 65
"""Maximum parts per row in attention kernels (`kvd.worker.cache.splits`)."""
SPLIT_TOKENS = 4096
PARTS_ALIVE = 6
"""Layers whose partial results exist at once (measured with lazy copies: 5.6 of 12 layers)."""
LOOSE_BYTES = 32 * 1024 * 1024
"""Bytes for holes in malloc's heap, for requests, and for what libraries load at first use."""

TOKENIZER_PEAK = 24
"""Bytes that loading a tokenizer takes, per byte of its file (measured: 11 to 23 for eight models,
the most for Gemma 2)."""
TOKENIZER_HELD = 14
"""Bytes that a tokenizer holds afterwards, per byte of its file (measured: 3 to 7 for eight models,
and 13 to 14 for a random vocabulary)."""
TRANSFORMERS_BYTES = 48 * 1024 * 1024
"""Bytes of transformers and what it imports, for tokenizers that need it (measured: 28 MB)."""
STARTING_BYTES = 384 * 1024 * 1024
"""Bytes that a worker may hold before its first grant: the interpreter and its libraries (measured:
45 MiB on Linux), the model's configuration and the headers of its weights."""
HOST_BYTES = 2560 * 1024 * 1024
"""Bytes of the host's memory charged for a process whose device has memory of its own (measured on
an H200 with small models: 2.0 to 2.2 GB for each of four, 2.8 to 3.2 GB for one and the daemon)."""
MIN_TOLERANCE_BYTES = 256 * 1024 * 1024
TOLERANCE_PARTS = 8


def limit_bytes(granted: int, ranks: int = 1) -> int:
    """Return the bytes above which a worker of this many processes is ended.

    The tolerance above the grant covers short needs that are not requested, such as tokenizing a
    long prompt: `MIN_TOLERANCE_BYTES` for each process, or the grant divided by `TOLERANCE_PARTS`
    if that is more.
    """
    tolerance = max(MIN_TOLERANCE_BYTES * ranks, granted // TOLERANCE_PARTS)
    return max(STARTING_BYTES * ranks, granted + tolerance)


def pass_tokens(chunk: int, *, cuda: bool, wide: bool = False) -> int:
    """Return the prompt tokens of a prefill pass with chunks of ``chunk`` tokens.

    ``wide``: whether several GPUs compute each pass together.
    """
    if not cuda:
        return max(chunk, PASS_TOKENS)
    return max(chunk, WIDE_PASS_TOKENS if wide else CUDA_PASS_TOKENS)


def freed_bytes(scratch: int = 0, *, on_cpu: bool, cuda: bool) -> int:
    """Return how many bytes of freed buffers MLX may keep for reuse; ``scratch``: in bytes."""
    if on_cpu:
        return FREED_BYTES_ON_CPU
    return max(FREED_BYTES_ON_CUDA, scratch) if cuda else FREED_BYTES


def waiting_bytes(token_bytes: int, layer_bytes: int, tokens: int, chunk: int) -> int:
    """Return the maximum bytes of what a prefill pass leaves besides the pools.

    These are pages and tails until the flush, and kept tails until the next pass. They are charged
    in addition to `step_bytes`, since decode steps run between a pass's stages.
    ``token_bytes``: keys and values of one token in all layers, not quantized, because short
    prompts leave tails. ``layer_bytes``: those in the largest layer, which the flush joins.
    ``tokens``: of the pass. ``chunk``: tokens of a chunk. The tails before the pass's chunks are
    copied too (`PrefillOrder`), and a tail is kept after each chunk.
    """
    kept = tokens // chunk * PAGE_TOKENS if chunk >= KEPT_FROM else 0
    return (token_bytes + layer_bytes) * (tokens + TAIL_TOKENS - 1 + kept)


def scratch_bytes(scratch: int, *, native: bool, parts: int = 0) -> int:
    """Return the bytes charged for a step's scratch.

    Native attention reads pages in place. It needs only the quarter of the scratch that stepping
    down may use (`kvd.worker.cache.settings.CacheSettings`). ``parts`` are the bytes of decode
    steps (`parts_bytes`). These run between the stages of a prefill pass, whose dense copies take
    at most the rest of the scratch.
    """
    return scratch // 4 if native else max(scratch, scratch - scratch // 4 + parts)


def parts_bytes(config: dict[str, Any], rows: int, context: int) -> int:
    """Return the maximum bytes of kernels' partial results if one row has ``context`` tokens."""
    text = config.get("text_config") or config
    heads = _first(text, "num_attention_heads", "n_head", "n_heads")
    width = _first(text, "hidden_size", "n_embd", "d_model")
    size = text.get("head_dim") or width // max(1, heads)
    splits = (rows * ROW_SPLITS + context // SPLIT_TOKENS) * 5 // 4
    layers = min(PARTS_ALIVE, text.get("num_hidden_layers") or PARTS_ALIVE)
    # In float32 per part and head: a sum for each channel, the largest logit, the sum of weights.
    return layers * splits * heads * (size + 2) * 4


def _first(config: dict[str, Any], *names: str) -> int:
    """Return a number that configurations store under several names; 0 if there is none."""
    return next((int(config[name]) for name in names if config.get(name)), 0)


def traces_bytes(layers: int, *, native: bool) -> int:
    return MAX_TRACES * layers * (NATIVE_TRACE_BYTES if native else TRACE_BYTES)


def step_bytes(
    config: dict[str, Any], chunk: int, rows: int, *, on_cpu: bool, whole_logits: int = 0
) -> int:
    """Return the maximum bytes of a step outside attention: activations first, then sampling.

    ``chunk``: prompt tokens per pass. ``rows``: maximum rows in a decode step. ``whole_logits``:
    tokens of a scored prompt whose logits exist at once, if they are more than `SCORED_AT_ONCE`.
    """
    itemsize = 4 if on_cpu else 2
    activations = CHUNK_COPIES * (chunk + rows) * _width(config) * itemsize
    vocabulary = _largest(config.get("text_config") or config, "vocab_size")
    logits = max(rows, SCORED_AT_ONCE) * vocabulary * 4
    at_once = min(logits, max(SAMPLED_AT_ONCE, vocabulary * 4))
    sampling = LOGIT_COPIES * logits + SAMPLED_COPIES * at_once
    if whole_logits:
        sampling += whole_logits * vocabulary * itemsize
    else:
        sampling += chunk * (STAGE_COPIES * _hidden(config) + _joined(config)) * itemsize
    return COUNT_BYTES * rows * vocabulary + max(activations, sampling)


def _hidden(config: dict[str, Any]) -> int:
    text = config.get("text_config") or config
    return _largest(text, "hidden_size", "n_embd", "d_model")


def _joined(config: dict[str, Any]) -> int:
    """Return the channels of a token's queries, keys and values that exist between stages.

    They are those of one layer, and the keys and values of all layers if layers share them.
    """
    text = config.get("text_config") or config
    heads = _largest(text, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _largest(text, "num_key_value_heads") or heads
    size = _largest(text, "head_dim", "global_head_dim") or _hidden(config) // max(1, heads)
    layers = text["num_hidden_layers"] if text.get("num_kv_shared_layers") else 1
    return (heads + 2 * kv_heads * layers) * size


def _width(config: dict[str, Any]) -> int:
    """Return the channels of a token's widest activation.

    A mixture of experts has the input of each chosen expert, and the outputs of all of them.
    Inputs count half, because they are copied less often (measured: 3.5 copies).
    """
    text = config.get("text_config") or config
    text = text | (text.get("ffn_config") or {})
    hidden = _largest(text, "hidden_size", "n_embd", "d_model")
    dense = _largest(text, *_DENSE_WIDTHS) or 4 * hidden
    experts = _largest(text, *_EXPERTS_PER_TOKEN)
    expert = _largest(text, "moe_intermediate_size", "expert_ffn_hidden_size") or dense
    attention = _largest(text, "num_attention_heads") * _largest(text, "head_dim")
    return max(hidden, dense, attention, experts * expert, experts * hidden // 2)


def _largest(config: dict[str, Any], *names: str) -> int:
    """Return the largest number under these names. Some models have one for each layer."""
    values = [config.get(name) for name in names]
    lists = (value if isinstance(value, list) else [value] for value in values)
    return max((item for items in lists for item in items if isinstance(item, int)), default=0)
