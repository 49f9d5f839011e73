"""The measurements that `bench.gpu.all` runs: commands, expected seconds and limits."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.bars import Bar
from kvd.worker.process import interpreter

Report = dict[str, Any]
SMALL, LARGE = "qwen3-0.6b", "qwen3-8b"
TRAINED_CONFIG = '{"hidden":640,"layers":16,"heads":10,"kv_heads":2,"intermediate":1920}'
TRACES = "steady shared long chats turns heavy"


def stated(report: Report) -> list[Report]:
    """Return the measured bars of a report, and those of its cases."""
    found = [bar for bar in report.get("bars", []) if bar["passed"] is not None]
    for case in report.get("cases", []):
        found += [
            bar | {"what": f"{case['tokens']} tokens: {bar['what']}"}
            for bar in case.get("bars", [])
        ]
    return found


FIDELITY = {"k8v8": (1e-4, 0.997), "k8v4": (2e-3, 0.0)}
"""Limits of the embedded model: most KL divergence, least share of equal top tokens."""


def fidelity(report: Report) -> list[Report]:
    """Return the bars of 8-bit keys for a report of `bench.fidelity`."""
    bars = []
    for row in report["results"]:
        if (limits := FIDELITY.get(row["recipe"])) is None:
            continue
        for part in ("prefill", "decode"):
            if row.get(part):
                what = f"{row['recipe']}, {row['length']} tokens, {part}"
                bars.append(Bar(f"{what}: KL", row[part]["kl"], limits[0]))
                bars.append(Bar(f"{what}: top-1", row[part]["top1"], limits[1], at_least=True))
    return [bar.as_dict() for bar in bars]


MIXED_BITS = "k4v4:k3v3-k4v3-k8v5-k3v3-k4v3-k5v4"
"""Bits by layer, repeated over the layers: a mix of K4V4's size, like those of the probe."""
LEAST_DECODE = 0.9
"""Limit of the decode speed with bits by layer, relative to K4V4 in all layers."""


def decode_speed(report: Report) -> list[Report]:
    """Return the bar of bits by layer for a report of `bench.gpu`, for each length."""
    speeds = {(row["kv"], row["tokens"]): row["tok_s"] for row in report["decode"]}
    return [
        Bar(
            f"decode with bits by layer relative to k4v4, {tokens} tokens",
            speed / speeds["k4v4", tokens],
            LEAST_DECODE,
            at_least=True,
        ).as_dict()
        for (kv, tokens), speed in speeds.items()
        if kv == MIXED_BITS
    ]


def _filled(text: str, folders: dict[str, str]) -> str:
    """Replace the names of folders. Other braces remain, such as those of JSON."""
    for name, path in folders.items():
        text = text.replace(f"{{{name}}}", path)
    return text


@dataclass(frozen=True)
class Measurement:
    """One benchmark: its module is run with ``options`` and ``--json``.

    Values of options may contain names of folders: ``{model}`` (random weights of the shape
    ``model``), ``{disk}``, ``{data}``, ``{trained}``.
    """

    name: str
    module: str
    options: dict[str, str]
    """Values by option; an option without a value has an empty text."""
    dry: dict[str, str]
    """Values that replace those of ``options`` on a CPU."""
    estimate_s: float
    """Expected seconds on an H200, including what must be compiled or written first."""
    model: str = ""
    dry_model: str = "demo"
    needs: dict[str, str] = field(default_factory=dict)
    """Files that must be in the folder which is the value of an option."""
    packages: Sequence[str] = ("mlx",)
    """Modules that must be installed."""
    runs_mlx_lm: bool = False
    """Whether mlx-lm is measured in its process or in processes that it starts. MLX then launches
    kernels in its own way, not as in a worker (`interpreter.LAUNCHES`)."""
    environment: dict[str, str] = field(default_factory=dict)
    bars: Callable[[Report], list[Report]] = stated
    more_time: float = 2.0
    """The time limit, relative to the expected seconds."""

    def arguments(self, folders: dict[str, str], json: str, *, dry: bool) -> list[str]:
        """Return the arguments after ``python -m MODULE``."""
        found = []
        for option, value in (self.options | self.dry if dry else self.options).items():
            found += [option, *(_filled(word, folders) for word in shlex.split(value))]
        return [*found, "--json", json]

    def missing(self, folders: dict[str, str], *, dry: bool) -> list[str]:
        """Return what must be there and is not: modules, and paths of files."""
        found = [name for name in self.packages if importlib.util.find_spec(name) is None]
        for option, names in self.needs.items():
            if not (dry and option in self.dry):
                folder = Path(_filled(self.options[option], folders))
                paths = [folder / name for name in names.split()]
                found += [str(path) for path in paths if not path.is_file()]
        return found

    @property
    def variables(self) -> dict[str, str]:
        """Variables of its process's environment."""
        launches = {} if self.runs_mlx_lm else interpreter.LAUNCHES
        return launches | self.environment

    @property
    def limit_s(self) -> float:
        """Seconds after which the measurement is ended."""
        return self.more_time * self.estimate_s + 30


def measurements(minutes: float) -> list[Measurement]:
    """Return all measurements, the most important first; ``minutes`` is the time of training."""
    return [*_correctness(), *_servers(), *_engines(), *_training(minutes)]


def _correctness() -> list[Measurement]:
    return [
        Measurement(
            "device-tests",
            "bench.gpu.device_tests",
            {"--tests": "tests/worker/kernels/test_device.py tests/worker/gpu", "--processes": "6"},
            {"--tests": "tests/worker/gpu/test_products.py", "--processes": "0"},
            300,
            packages=("mlx", "pytest", "hypothesis", "xdist"),
            environment={"MLX_ENABLE_TF32": "0"},
        ),
        Measurement(
            "starts",
            "bench.gpu.starts",
            {"--shape": SMALL, "--runs": "1"},
            {"--shape": "tiny"},
            150,
        ),
        Measurement(
            "attention-bits",
            "bench.attention",
            {"--path": "fused", "--parts": "bits"},
            {"--path": "native", "--parts": "bits", "--schemes": "k4v4", "--small": ""},
            60,
        ),
        _decode_bits(),
        Measurement(
            "calibrate",
            "bench.calibrate",
            {"--model": "{model}"},
            {"--prompts": "1", "--tokens": "384"},
            200,
            model=SMALL,
            dry_model="tiny",
        ),
    ]


def _decode_bits() -> Measurement:
    tiny = {"--shape": "tiny", "--attention": "reference", "--steps": "4", "--chunk": "64"}
    return Measurement(
        "decode-bits",
        "bench.gpu",
        {
            "--shape": SMALL,
            "--only": "kvd",
            "--attention": "fused",
            "--kv": f"k4v4 {MIXED_BITS}",
            "--rows": "8",
            "--tokens": "4096 16384",
            "--chunk": "2048",
            "--steps": "128",
        },
        tiny | {"--rows": "2", "--tokens": "100"},
        90,
        packages=("mlx", "mlx_lm"),
        bars=decode_speed,
    )


def _servers() -> list[Measurement]:
    return [
        Measurement(
            "serve",
            "bench.serve",
            {
                "--model": "{model}",
                "--sides": "'kvd k8v8' mlx-lm",
                "--traces": f"{TRACES} steady",  # again, to compare a warm server with a new one
                "--runs": "2",
                "--seconds": "260",
            },
            {"--traces": "steady/40", "--runs": "1", "--seconds": "60"},
            360,
            model=SMALL,
            packages=("mlx", "mlx_lm"),
            runs_mlx_lm=True,
            more_time=1.4,
        ),
        Measurement(
            "packed",
            "bench.packed",
            {
                "--model": "{model}",
                "--prompts": "32x1650 1x50000",
                "--passes": "1024 4096",
                "--chunk": "1024",
                "--rounds": "2",
            },
            {"--prompts": "2x200 1x600", "--passes": "64 512", "--chunk": "64", "--rounds": "1"},
            100,
            model=SMALL,
        ),
        Measurement(  # prefixes could end at multiples of 256 if this costs little
            "packed-256",
            "bench.packed",
            {
                "--model": "{model}",
                "--prompts": "32x1650 1x16384",
                "--passes": "4096",
                "--chunk": "256",
                "--rounds": "2",
            },
            {"--prompts": "2x200", "--passes": "512", "--chunk": "64", "--rounds": "1"},
            60,
            model=SMALL,
        ),
        *_timelines(),
    ]


def _engines() -> list[Measurement]:
    return [
        Measurement(
            "ssd",
            "bench.ssd.engine",
            {
                "--model": "{model}",
                "--tokens": "8192 32768",
                "--runs": "1",
                "--stream-reads": "8",
                "--minutes": "4",
                "--store": "{disk}",
            },
            {"--tokens": "768", "--stream-reads": "1"},
            180,
            model=LARGE,
        ),
        Measurement(
            "grammar",
            "bench.grammar",
            {
                "--shape": SMALL,
                "--pairs": "7",
                "--tokens": "192",
                "--no-masks": "",
            },
            {"--shape": "demo", "--pairs": "1", "--tokens": "8"},
            40,
        ),
        _pressure(SMALL, streams=32, estimate_s=110),
        _pressure(LARGE, streams=16, estimate_s=200),
        Measurement(
            "engine",
            "bench.gpu",
            {
                "--shape": SMALL,
                "--attention": "fused",
                "--prefill": "50000",
                "--steps": "96",
                "--runs": "2",
            },
            {
                "--shape": "tiny",
                "--attention": "reference",
                "--prefill": "200",
                "--steps": "4",
                "--runs": "1",
                "--rows": "2",
                "--tokens": "100",
                "--chunk": "64",
            },
            180,
            packages=("mlx", "mlx_lm"),
            runs_mlx_lm=True,
        ),
        Measurement(
            "prefill",
            "bench.prefill",
            {"--contexts": "4096 16384 65536"},
            {"--contexts": "512"},
            30,
        ),
    ]


HEAVY = {"--rows": "32", "--prompt": "1650", "--new": "64", "--rounds": "2"}
"""As the trace ``heavy``: rows decode while other prompts are prefilled."""
PREFIX = {"--shared": "1500", "--prompt": "1540", "--new": "24"}
"""As the trace ``shared``."""


def _timelines() -> list[Measurement]:
    """Return measurements of the cost of stages, and of requests that wait for MLX's compiler."""
    return [
        _timeline("timeline", {}),
        _timeline("timeline-whole-passes", {"--whole-passes": ""}),
        _timeline("timeline-heavy", HEAVY),
        _timeline("timeline-heavy-whole-passes", HEAVY | {"--whole-passes": ""}),
        _timeline("timeline-heavy-long-stages", HEAVY | {"--stage-steps": "12"}),
        _timeline("timeline-shared", PREFIX),
    ]


def _timeline(name: str, more: dict[str, str]) -> Measurement:
    """Prompts that arrive together, eight short ones by default, with each step's phases."""
    dry = {"--chunk": "256", "--rounds": "1", "--rows": "2", "--new": "4"}
    if "--shared" in more:
        dry |= {"--shared": "300", "--prompt": "340"}
    elif "--prompt" in more:
        dry |= {"--prompt": "300"}
    return Measurement(
        name,
        "bench.timeline",
        {
            "--model": "{model}",
            "--rows": "8",
            "--new": "128",
            "--chunk": "1024",
            "--rounds": "4",
            **more,
        },
        dry,
        25,
        model=SMALL,
    )


def _pressure(shape: str, *, streams: int, estimate_s: float) -> Measurement:
    """Return a run of the wide model and a copy, with little more memory than both need idle."""
    return Measurement(
        f"pressure-{shape.removeprefix('qwen3-')}",
        "bench.pressure",
        {
            "--model": "{model}",
            "--copies": "1",
            "--streams": str(streams),
            "--share": "0.1",
            "--completion": "200",
        },
        {"--streams": "4", "--share": "0.5", "--prompt": "80", "--completion": "20"},
        estimate_s,
        model=shape,
    )


def _training(minutes: float) -> list[Measurement]:
    return [
        Measurement(
            "train",
            "bench.gpu.train",
            {
                "--data": "{data}",
                "--config": f"'{TRAINED_CONFIG}'",
                "--minutes": f"{minutes:g}",
                "--folder": "{trained}",
            },
            {
                "--config": '\'{"hidden":64,"layers":1,"heads":1,"kv_heads":1,"intermediate":64}\'',
                "--minutes": "0.02",
                "--tokens": "512",
                "--eval-lengths": "128",
            },
            60 * minutes + 90,
            needs={"--data": "data.npz paragraphs.json"},
            packages=("torch", "numpy", "safetensors", "tokenizers"),
            more_time=1.1,
        ),
        Measurement(
            "fidelity",
            "bench.fidelity",
            {
                "--model": "{trained}",
                "--lengths": "2048 8192",
                "--prompts": "16",
                "--batch": "8",
                "--recipes": "k8v8 k8v4 k5v3 k4v8 k4v8:token k4v4 k4v4:token "
                "k8v4:probe k4v4:probe k4v4:probe48 k8v8:mlx-lm k4v4:mlx-lm",
            },
            {
                "--model": "demo",
                "--lengths": "512",
                "--prompts": "1",
                "--batch": "1",
                "--recipes": "k8v8 k4v4:probe",
            },
            130,
            needs={"--model": "model.safetensors"},
            environment={"MLX_ENABLE_TF32": "0"},
            bars=fidelity,
        ),
    ]
