"""Checks of Python, the pinned packages, the device and native code."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shlex
import sys

import kvd
from kvd.doctor.finding import Finding, fail, ok, skip, warn
from kvd.doctor.scene import Scene
from kvd.host import blas, installed
from kvd.host.memory import nvidia
from kvd.host.units import format_bytes
from protocol.errors import ConfigError, KvdError

_LEAST = (3, 11)
_MAX_ERROR = 1e-4
"""Largest error of a correct float32 matrix product."""
_PIN = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^;\s]+)(?:\s*;\s*(.*))?$")


def python(_scene: Scene) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _LEAST:
        return fail("python", f"{version} is too old", "install Python 3.11 or newer")
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return fail(
            "python",
            f"{version} is built for Intel, but MLX's Metal backend needs Apple silicon",
            "on an Apple silicon Mac, install an arm64 Python and reinstall kvd with it",
        )
    return ok("python", f"{version}, {sys.executable}")


def versions(scene: Scene) -> Finding:
    found, wrong = [], []
    for name, wanted in pins(scene.platform).items():
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have = "missing"
        found.append(f"{name} {have}")
        if have != wanted:
            wrong.append(f"{name} is {have}, but kvd {kvd.__version__} needs {wanted}")
    if wrong:
        return fail("versions", "; ".join(wrong), installed.find().command())
    if not found:
        return warn(
            "versions",
            f"kvd {kvd.__version__} is not installed, so its requirements are unknown",
            installed.find().command(),
        )
    return ok("versions", f"kvd {kvd.__version__}, {', '.join(found)}")


def pins(system: str) -> dict[str, str]:
    try:
        requirements = importlib.metadata.requires(installed.DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {}
    for text in requirements:
        if pin := _PIN.match(text):
            name, version, marker = pin.groups(default="")
            if "extra" not in marker and (not marker or system in marker):
                found[name] = version
    return found


def device(scene: Scene) -> Finding:
    """Check that MLX runs and computes correctly."""
    engine = scene.engine
    if isinstance(engine, KvdError):
        see = shlex.join([sys.executable, "-c", "import mlx.core"])
        advice = f"run `{see}` to see why; then install kvd again: {installed.find().command()}"
        return fail("device", f"MLX does not run: {engine.message}", advice)
    name = f" ({engine['name']})" if engine["name"] else ""
    observed = f"MLX {engine['mlx']} computes on {engine['device']}{name}"
    if not engine["error"] < _MAX_ERROR:
        return fail(
            "device",
            f"{observed}, and a matrix product is off by {engine['error']:.2g}",
            "do not use this machine; report it with the output of `kvctl doctor --json`",
        )
    if engine["device"] == "cpu" and scene.platform == "darwin":
        return fail(
            "device", f"{observed}: there is no Metal", "use an Apple silicon Mac, not a VM"
        )
    if engine["device"] == "cpu" and nvidia.has_cuda_build():
        return warn(
            "device",
            f"{observed}, though MLX's CUDA build is installed",
            "install NVIDIA's driver, and check that `nvidia-smi` lists the GPU",
        )
    return ok("device", observed, memory_bytes=engine["memory_bytes"])


def openblas(scene: Scene) -> Finding:
    """Check that workers on a CPU preload OpenBLAS."""
    if scene.platform != "linux" or scene.computes_on_cpu is False:
        return skip("openblas", "only for Linux machines without an accelerator")
    setting = scene.settings.blas
    try:
        library = blas.find(scene.root) if setting == "auto" else blas.choose(setting)
    except ConfigError as error:
        return fail("openblas", error.message, "set blas to auto or to an existing library")
    if library is None:
        why = 'switched off by blas = "off"' if setting == "off" else "not found"
        advice = (
            'set blas = "auto"' if setting == "off" else "Debian: apt install libopenblas0-pthread"
        )
        return warn("openblas", f"{why}: MLX's own BLAS is 6 to 80 times slower", advice)
    engine = scene.engine
    if setting == "auto" and not isinstance(engine, KvdError) and engine["blas"] != str(library):
        return ok("openblas", f"{library} exists; workers preload {engine['blas']}")
    return ok("openblas", f"workers preload {library}")


def native(scene: Scene) -> Finding:
    """Check that kvd's own operations for the CPU are built, or can be."""
    engine = scene.engine
    if isinstance(engine, KvdError) or not scene.computes_on_cpu:
        return skip("native", "kvd's own operations are for machines without an accelerator")
    if scene.settings.native == "off":
        observed = 'switched off by native = "off": decoding is about three times slower'
        return warn("native", observed, 'set native = "auto"')
    if engine["native_built"]:
        return ok("native", "kvd's own operations are built")
    if engine["compiler"] is None:
        observed = "no C++ compiler for kvd's own operations: decoding is about three times slower"
        return warn("native", observed, "Debian: apt install g++")
    return ok("native", f"the first load builds them once, with {engine['compiler']}")


def wired_limit(scene: Scene) -> Finding:
    """Compare Metal's recommended limit with kvd's own calculation."""
    if scene.platform != "darwin":
        return skip("wired limit", "only macOS has one")
    engine, host = scene.engine, scene.host
    calculated = host.accelerator_limit or 0
    recommended = 0 if isinstance(engine, KvdError) else engine["recommended_bytes"]
    numbers = {"calculated_bytes": calculated, "recommended_bytes": recommended}
    if recommended and abs(recommended - calculated) > 0.02 * recommended:
        budget = int(0.75 * recommended / 2**30)
        return warn(
            "wired limit",
            f"Metal recommends {format_bytes(recommended)}, but kvd calculates "
            f"{format_bytes(calculated)}",
            f'set budget in config.toml, such as "{budget}GiB", and report the difference',
            **numbers,
        )
    observed = (
        f"Metal may use {format_bytes(recommended or calculated)} of {format_bytes(host.total)}"
    )
    return ok(
        "wired limit", f"{observed}; `sudo sysctl iogpu.wired_limit_mb=…` changes it", **numbers
    )
