"""OpenBLAS gets a processor type only where it does not recognize the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.host import blas, openblas_core
from kvd.host.environment import environment

AVX2 = "avx avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that fakes the processor's flags and the type that OpenBLAS detects."""
    library = Path("/lib/libopenblas.so.0")
    monkeypatch.delenv(openblas_core.VARIABLE, raising=False)

    def describe(flags: str, detected: str | None) -> Path:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {flags}\nmodel : 207\n")
        monkeypatch.setattr(openblas_core, "CPUINFO", cpuinfo)
        monkeypatch.setattr(openblas_core, "detected", lambda _: detected)
        return library

    return describe


@pytest.mark.parametrize(
    ("flags", "detected", "chosen"),
    [
        (AVX512 + " avx512_bf16", "Prescott", "Cooperlake"),
        (AVX512, "Prescott", "SkylakeX"),
        (AVX2, "Prescott", "Haswell"),
        ("sse3", "Prescott", None),
        (AVX512, "SkylakeX", None),
        (AVX2, "Zen", None),
        (AVX512, None, None),
    ],
)
def test_the_fastest_fitting_type_replaces_a_failed_detection(machine, flags, detected, chosen):
    library = machine(flags, detected)

    assert openblas_core.override(library) == chosen
    assert environment(library).get(openblas_core.VARIABLE) == chosen


def test_a_type_that_the_user_chose_is_kept(machine, monkeypatch):
    library = machine(AVX512, "Prescott")
    monkeypatch.setenv(openblas_core.VARIABLE, "Haswell")

    assert openblas_core.override(library) is None
    assert environment(library)[openblas_core.VARIABLE] == "Haswell"


def test_without_cpuinfo_no_type_is_chosen(machine, monkeypatch, tmp_path):
    library = machine(AVX512, "Prescott")
    monkeypatch.setattr(openblas_core, "CPUINFO", tmp_path / "missing")

    assert openblas_core.override(library) is None


@pytest.mark.skipif(blas.choose("auto") is None, reason="no OpenBLAS here")
def test_the_real_library_names_its_type():
    detected = openblas_core.detected(blas.choose("auto"))

    assert detected
    assert detected.isalnum()


def test_a_library_that_cannot_be_loaded_has_no_type(tmp_path):
    assert openblas_core.detected(tmp_path / "missing.so") is None
