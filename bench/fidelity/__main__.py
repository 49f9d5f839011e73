"""Measure what quantized KV caches cost a model in quality.

    python -m bench.fidelity --quick                         # under a minute on a CPU
    python -m bench.fidelity --json bench/results/fidelity-linux-cpu.json
    python -m bench.fidelity --model /models/qwen3 --lengths 2048 --recipes k8v4 k4v4:clip
    python -m bench.fidelity.report bench/results/fidelity-h200.json     # table and plot

Prints, for each recipe and length: KL divergence to the dense cache in nats (mean), share of
positions with the same top token, change of perplexity, and share of recalled digits. Prefilled and
decoded positions are counted separately, and only those that attend to a quantized page. Everything
is computed in float32 unless --dtype says otherwise. On Linux, preload OpenBLAS:
LD_PRELOAD=libopenblas.so.0 OPENBLAS_THREAD_TIMEOUT=12.

Names of recipes:

"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from bench.fidelity import chosen as chosen_module
from bench.fidelity import entries
from bench.fidelity import recipes as recipes_module
from bench.fidelity.chosen import ChosenBits
from bench.fidelity.flow import CHUNK, DECODED, Score, run
from bench.fidelity.recipes import parse
from bench.fidelity.texts import file_texts, recall_texts
from kvd.host.home import locate
from kvd.worker.device import on_cpu
from kvd.worker.serving import model_files, seam

OUTLIER = 16
"""Copy of the constant in demo_training/export.py, which needs torch and so is not imported."""
LENGTHS = (1024, 2048, 4096, 8192)
SCHEMES = (
    "k8v8", "k8v6", "k8v4", "k6v6", "k6v4", "k5v5", "k4v8", "k5v3", "k4v4", "k3v4", "k3v3", "k2v2",
)  # fmt: skip
OPTIONS = (
    "", ":head8", ":sink64", ":kg32", ":vg32", ":kg32:vg32", ":kg32:head8", ":clip", ":kclip",
    ":vclip", ":refit", ":krefit", ":vrefit", ":clip:refit", ":vchannel", ":vhadamard",
    ":rotated", ":half", ":via8",
)  # fmt: skip
SETS = {
    "quick": ["k8v8", "k8v4", "k4v8", "k4v8:token", "k4v4", "k2v2"],
    "layouts": [
        f"{scheme}{layout}{tail}"
        for scheme in SCHEMES
        for layout in ("", ":token", ":hadamard")
        for tail in ("", ":no-tail")
    ],
    "keys": [
        f"{scheme}{layout}{head}"
        for scheme in ("k8v8", "k8v4", "k4v8", "k5v3", "k4v4", "k3v4", "k2v2")
        for layout in ("", ":token", ":hadamard", ":rotated")
        for head in ("", ":head8")
    ],
    "even": [
        f"{scheme}{options}"
        for scheme in ("k8v8", "k4v8", "k5v3", "k4v4", "k2v2")
        for options in (
            "", ":even", ":even:token", ":even:hadamard", ":even:rotated", ":even:rotated:head8",
            ":fine4", ":even:rotated:fine4",
        )
    ],
    "variants": [f"{scheme}{options}" for scheme in ("k4v4", "k5v3") for options in OPTIONS],
    "mixes": [
        *(f"k{k}v{v}" for k in (8, 6, 5, 4, 3) for v in (8, 6, 5, 4, 3, 2)),
        *(f"k6v{v}:kg32" for v in (4, 3, 2)),
        *(f"k4v4:only{layer}" for layer in range(6)),
        *(f"k5v3:only{layer}" for layer in range(6)),
    ],
}  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fidelity",
        description=f"{__doc__}{(recipes_module.__doc__ or '').partition('order:')[2]}\n"
        f"{chosen_module.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="demo, a folder or a Hub id (default: demo)")
    add("--lengths", type=int, nargs="+", help=f"tokens (default: {LENGTHS})")
    add("--prompts", type=int, default=16, help="texts of each length (default: 16)")
    add(
        "--decoded",
        type=int,
        default=DECODED,
        help=f"last tokens of a text that are decoded (default: {DECODED}); with more of them,"
        " shares of equal top tokens have smaller errors",
    )
    add("--text", type=Path, help="a text file instead of recall tasks; measures no recall")
    add("--recipes", nargs="+", metavar="NAME", help="recipes by name, see below (default: --set)")
    add("--set", nargs="+", choices=sorted(SETS), default=["layouts"], help="default: layouts")
    add("--quick", action="store_true", help="a few recipes, 2 texts of 1024 tokens")
    add("--batch", type=int, default=1, help="texts in one forward pass (default: 1)")
    add("--wave", type=int, default=12, help="recipes whose caches exist at once (default: 12)")
    add("--dtype", default="float32", choices=("float32", "float16", "bfloat16", "stored"))
    add(
        "--flat-keys",
        action="store_true",
        help="demo model only: first remove the outlier channels that its export gave the keys",
    )
    add("--home", type=Path, help="where calibrations are (default: KVD_HOME, else ~/.kvd)")
    add("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.lengths, arguments.prompts = arguments.lengths or [1024], 2
        arguments.set = ["quick"]
    arguments.recipes = arguments.recipes or [name for one in arguments.set for name in SETS[one]]
    arguments.lengths = arguments.lengths or list(LENGTHS)
    return arguments


def flatten_keys(model: Any) -> None:
    """Undo `raise_key_channels` of the demo model's export; this changes no logit.

    The export multiplies the key scales of the slowest RoPE pair by `OUTLIER` and divides the query
    scales by it, so that the keys have outlier channels like those of larger models.
    """
    for layer in model.layers:
        attention = layer.self_attn
        dim = attention.k_norm.weight.shape[0]
        pair = mx.array([dim // 2 - 1, dim - 1])
        attention.k_norm.weight[pair] = attention.k_norm.weight[pair] / OUTLIER
        attention.q_norm.weight[pair] = attention.q_norm.weight[pair] * OUTLIER


def measure(
    arguments: argparse.Namespace, loaded: model_files.LoadedModel, found: dict[str, Any]
) -> None:
    """Measure all lengths and recipes into ``found``; write the file after each length."""
    results, dense = [], []
    found |= {"dense": dense, "results": results}
    for length in arguments.lengths:
        if arguments.text:
            texts = file_texts(loaded.tokenizer, arguments.text, length, arguments.prompts)
        else:
            texts = recall_texts(loaded.tokenizer, length, arguments.prompts)
        scores = {one.name: Score() for one in arguments.recipes}
        started = time.monotonic()
        right = 0
        for first in range(0, len(arguments.recipes), arguments.wave):
            wave = arguments.recipes[first : first + arguments.wave]
            right = sum(
                run(loaded.model, part, wave, scores, decoded=arguments.decoded)
                for part in texts.parts(arguments.batch)
            )
            mx.clear_cache()
        digits = texts.answer * len(texts.tokens)
        dense.append(
            {
                "length": length,
                "texts": len(texts.tokens),
                "tokens": texts.tokens.shape[1],
                "recall": right / digits if digits else None,
                "seconds": round(time.monotonic() - started, 1),
            }
        )
        print(dense[-1], flush=True)
        for recipe in arguments.recipes:
            size = recipe.bytes_to_dense(length, len(loaded.model.layers))
            results.append(entries.entry(recipe.name, length, size, scores[recipe.name]))
            print(entries.line(results[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(entries.compact(found))


def _device() -> str:
    if on_cpu():
        return f"CPU, {platform.system()} {platform.machine()}"
    return str(mx.device_info().get("device_name", "GPU"))


def main() -> None:
    """Measure, print, write."""
    arguments = _arguments()
    seam.install()
    mx.set_cache_limit(4 * 1024**3)  # growing caches never reuse the sizes that they freed
    headers = model_files.inspect(model_files.resolve(arguments.model))
    # On accelerators, `load` joins layers, for kernels that have no float32.
    loaded = (model_files.load if on_cpu() else model_files.open_model)(headers.path)
    chosen = ChosenBits(loaded, headers, locate(arguments.home).calibration)
    try:
        names = dict.fromkeys(map(chosen.name, arguments.recipes))
        arguments.recipes = [parse(name) for name in names]
    except ValueError as wrong:
        raise SystemExit(f"bench.fidelity: {wrong}") from wrong
    if arguments.dtype != "stored":
        loaded.model.set_dtype(getattr(mx, arguments.dtype))
    if arguments.flat_keys:
        flatten_keys(loaded.model)
    found = {
        "model": arguments.model,
        "flat_keys": arguments.flat_keys,
        "text": str(arguments.text) if arguments.text else "recall tasks",
        "dtype": arguments.dtype,
        "chunk": CHUNK,
        "decoded": arguments.decoded,
        "device": _device(),
        "mlx": mx.__version__,
        "chosen": chosen.sources,
        "command": shlex.join(["python", "-m", "bench.fidelity", *sys.argv[1:]]),
    }
    measure(arguments, loaded, found)


if __name__ == "__main__":
    main()
