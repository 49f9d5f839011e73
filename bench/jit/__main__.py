"""Lists the modules that MLX would compile on CUDA while kvd loads a model and answers, by phase.

    python -m bench.jit [--kv k8v8] [--shape demo] [--calibrate] [--json FILE]

``--calibrate``: lists the modules of `kvctl calibrate` instead.

Most of MLX's CUDA operations are compiled in advance. Those with indices (gathers, scatters),
some products of quantized arrays and fused elementwise operations are compiled when a process first
needs them, one after another, several seconds each. The graph determines which ones are needed. So
this program needs no GPU: it runs kvd's CUDA path on the CPU, with plain operations in place of
kvd's own kernels (`tests.worker.attention.stand_in`), and records these operations. It ignores what
the replacements compute.

A key contains what MLX's name of the module contains: dtypes of elements and of indices, and the
number of index arrays (mlx 0.32.4). A fused operation is named after its operations; MLX compiles
one for each combination of dtypes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from bench.jit.recorder import Keys, Patched, Recorder
from kvd.worker import lean_imports

PROMPT = "The amber falcon waits beside the river until the evening. " * 20
TOKENS = 16
LAYERS = 2
"""Layers of the model. All layers need the same modules, and six take three times as long."""
REQUESTS: dict[str, dict[str, Any]] = {
    "first request": {},
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {5: 1.0}},
}
"""Sampling settings of the requests, in their order."""
TOGETHER = "prompts together"
"""The phase of prompts that share a beginning and arrive one after the other, while others decode.

Their rows join running ones, and several write pages at once, to places that do not follow each
other.
"""
MORE: dict[str, dict[str, Any]] = {"bias": {"min_tokens": 4, "logprobs": 2}}
"""Other settings of requests."""


CALIBRATION = "calibration"
"""The phase of a calibration, apart from those of its load."""


def _words(seed: int) -> str:
    words, draw = PROMPT.split(), random.Random(seed)
    return " ".join(draw.choice(words) for _ in range(40))


def measure(kv: str, shape: str) -> Keys:
    """Load a small model as on CUDA, and answer requests; return the keys of each phase.

    A key appears only in the first phase that needs it. Call it before `mlx.nn` is imported.
    """
    recorder = Recorder()
    patched = Patched(recorder)
    with patched.installed(), tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        lean_imports.install()
        from bench.gpu import shapes
        from bench.jit.device import as_cuda, phases
        from kvd.config.kv import parse_kv
        from kvd.worker.serving.calibration import FOLDER_VARIABLE
        from protocol.types import Sampling
        from tests.worker.core.driver import Driver

        path = Path(name, "model")
        shapes.write(shape, mx.bfloat16, path, LAYERS)
        probed = mock.patch.dict(os.environ, {FOLDER_VARIABLE: name})  # so that layers are probed
        with probed, as_cuda(patched.opaque), phases(recorder):
            with recorder.phase("load"):
                driver = Driver(str(path), kv=parse_kv(kv), prefill_chunk=256)
                driver.run()  # the rest of the probe
            for request, settings in REQUESTS.items():
                with recorder.phase(request):
                    sampling = Sampling(seed=1, **settings)
                    more = MORE.get(request, {})
                    driver.submit(request, PROMPT, sampling, max_tokens=TOKENS, **more)
                    driver.run()
            with recorder.phase(TOGETHER):
                for number in range(8):
                    driver.submit(
                        f"{TOGETHER} {number}",
                        f"{PROMPT}{PROMPT}{_words(number)}",
                        Sampling(temperature=0.7 * (number % 3), seed=number),
                        max_tokens=TOKENS,
                        ignore_eos=True,
                    )
                    driver.step()
                    driver.step()
                driver.run()
    return recorder.found


def measure_calibration(shape: str) -> Keys:
    """Calibrate a small model as on CUDA; return the keys. Call it before `mlx.nn` is imported."""
    recorder = Recorder()
    patched = Patched(recorder)
    with patched.installed(), tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        lean_imports.install()
        from bench.gpu import shapes
        from bench.jit.device import as_cuda, phases
        from kvd.worker.tools import calibrate, fidelity
        from protocol.kv import KVSpec, schemes_of

        path = Path(name, "model")
        shapes.write(shape, mx.bfloat16, path, LAYERS)
        with as_cuda(patched.opaque), phases(recorder), recorder.phase(CALIBRATION):
            schemes, floor = schemes_of(KVSpec()), fidelity.Floor()
            calibrate.calibrate(str(path), schemes, floor, lambda *_: None, count=1, tokens=400)
    return recorder.found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kv", default="k8v8")
    parser.add_argument("--shape", default="demo", help="of bench.gpu; keys do not depend on it")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.calibrate:
        found = measure_calibration(options.shape)
    else:
        found = measure(options.kv, options.shape)
    for phase, keys in found.items():
        print(f"{phase}: {len(keys)}", *keys, sep="\n  ")
    if options.json is not None:
        options.json.write_text(json.dumps({"kv": options.kv, "modules": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
