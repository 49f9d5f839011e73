"""Runs kernels with modules that kvd compiled, in a process of its own; prints what happened.

``test_device.py`` starts it twice with the same cache folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from kvd.worker.artifacts import modules
from kvd.worker.attention.kernels.arguments import Attend
from kvd.worker.attention.kernels.fused import has_group_products
from kvd.worker.attention.kernels.kernel_files import CudaKernel
from kvd.worker.attention.kernels.language import CUDA, Language
from kvd.worker.attention.kernels.launch import Launch, run
from kvd.worker.gpu import products
from tests.worker.kernels import cases
from tests.worker.kernels.decoding import Step
from tests.worker.kernels.right import assert_right
from tests.worker.kernels.test_prefill import ATTENDED, check_attend, check_splits


def marked() -> float:
    """Run a kernel whose module has other code than its text, so MLX must have read the module."""
    kernel = CudaKernel("kvd_marked", ["x"], ["out"], "out[0] = x[0];", "")
    given = {"inputs": [mx.ones((1,))], "template": [], "output_dtypes": [mx.float32]}
    text = kernel.text(*given.values())
    found = modules.current()
    assert found is not None
    module = found._compile(text.own_text.replace("out[0] = x[0];", "out[0] = 7.0f;"))
    found._known.add(text.module)
    found._put(text.module, f"{text.kernel}\t{text.symbol}\n".encode(), module)
    launch = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)]}
    return float(kernel(**given, **launch)[0].item())


def check_groups() -> None:
    """Check the kernel that only kvd compiles (`kernels.group_products`)."""

    def made(make: Callable[[Language, Attend], Launch], given: Attend) -> list[np.ndarray]:
        return [np.array(found.astype(mx.float32)) for found in run(make(CUDA, given), CUDA)]

    for shape in ATTENDED.values():
        check_attend(made, shape, warpgroups=True)
    check_splits(made, warpgroups=True)


def main() -> None:
    modules.activate(lambda stage, _fraction: sys.stderr.write(f"{stage}\n") and None)
    found = modules.current()
    assert found is not None, "modules are not kept on this machine"
    start = time.perf_counter()
    steps = [Step(case) for case in cases.MATRIX]
    launches = [step.split("cuda") for step in steps]
    with found.ahead(0.0):
        results = [run(launch, CUDA) for launch in launches]
    slowest = 0.0
    for step, (parts,) in zip(steps, results, strict=True):
        began = time.perf_counter()
        mx.eval(parts)
        slowest = max(slowest, time.perf_counter() - began)
        (out,) = run(step.combine("cuda", parts), CUDA)
        assert_right(step, np.array(out.astype(mx.float32)))
    right = products.find(mx.bfloat16) is not None
    groups = has_group_products()
    if groups:
        check_groups()
    about = {
        "groups": groups,
        "right": right,
        "compiled": found.compiled,
        "kernels": len(found._known),
        "seconds": time.perf_counter() - start,
        "slowest_ms": slowest * 1e3,
        "marked": marked(),
    }
    found.keep()
    sys.stdout.write(json.dumps(about))


if __name__ == "__main__":
    main()
