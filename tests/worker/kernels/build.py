"""Compiles a kernel's text as C++ with the headers in `shim/`, each text once per session.

Runs no kernel and uses no MLX arrays.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.worker.kernels.wrap import Language, Wrapped

SHIM = Path(__file__).parent / "shim"

_CHECKS = (
    "bounds,alignment,null,shift-exponent,signed-integer-overflow,integer-divide-by-zero,"
    "float-cast-overflow"
)
_COMMON = (
    "-std=c++20",
    "-O0",  # compile time matters more than run time
    "-g1",  # line numbers: some faults report only an address
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",  # words are reinterpreted as numbers
    f"-fsanitize={_CHECKS}",
    "-fno-threadsafe-statics",  # threadgroup arrays need no guarded initialization
    "-fno-sanitize-recover=all",
    "-Wno-attributes",  # [[kernel]], [[buffer(0)]]
    "-Werror=vla",  # neither language has arrays of variable length
)
_RACES = ("-fsanitize=thread",)
"""Inserts a call before each memory access (`shim/races.h`). Compiling takes 50 % longer."""
_WISHED = (
    "-march=native",
    "-fcf-protection=none",
    "-fexcess-precision=16",  # half rounds after each operation
    "-ftrivial-auto-var-init=pattern",  # uninitialized locals must not be zero by chance
)
"""Flags that are left out if the compiler does not support them."""
_BY_LANGUAGE: dict[str, tuple[str, ...]] = {
    "metal": ("-fsingle-precision-constant",),  # Metal has no double
    "cuda": ("-Werror=double-promotion", f"-I{SHIM / 'cuda'}"),
}


class BuildFailed(Exception):
    """The compiler rejected a kernel. The exception's text is the compiler's output."""


def compiler() -> str | None:
    """Return the path of g++, or None. Only on Linux, because the shim needs ELF libraries."""
    return shutil.which("g++") if sys.platform == "linux" else None


def environment() -> dict[str, str]:
    """Return the environment of child processes, without LD_PRELOAD.

    A BLAS that is preloaded for MLX would start threads in every child.
    """
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kvd-shim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _call(*arguments: str) -> None:
    command = [compiler() or "g++", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise BuildFailed(done.stderr)


@functools.cache
def _flags() -> tuple[str, ...]:
    """Return those of `_WISHED` that this compiler supports."""
    found = []
    for flag in _WISHED:
        try:
            _call("-Werror", flag, "-x", "c++", "-c", os.devnull, "-o", os.devnull)
        except BuildFailed:
            continue
        found.append(flag)
    return tuple(found)


_locks: dict[Path, threading.Lock] = {}
_guard = threading.Lock()


def _once(path: Path, *arguments: str) -> Path:
    """Create a file with a call of the compiler unless it exists. Thread-safe."""
    with _guard:
        lock = _locks.setdefault(path, threading.Lock())
    with lock:
        if not path.exists():
            _call(*arguments, "-o", str(path))
    return path


def _written(name: str, text: str) -> Path:
    path = _folder() / name
    with _guard:
        if not path.exists():
            path.write_text(text)
    return path


def runner() -> Path:
    """Return the path of the program that runs a kernel's library."""
    path = _folder() / "runner"
    source = str(SHIM / "runner.cpp")
    return _once(path, "-std=c++20", "-O2", "-rdynamic", source, "-ldl")


def _header(language: Language, flags: tuple[str, ...], races: bool) -> Path:
    """Precompile the language's header, which halves a small kernel's compile time; return it."""
    path = _written(f"{language}{races:d}.h", f'#include "{SHIM / language}.h"\n')
    _once(path.with_suffix(".h.gch"), *flags, "-x", "c++-header", str(path))
    return path


def library(wrapped: Wrapped, language: Language, *, races: bool = True) -> Path:
    """Return the path of a kernel's library; compile it unless the same text was compiled before.

    Raises `BuildFailed` if the compiler rejects it.
    """
    with _guard:
        flags = _COMMON + _flags() + _BY_LANGUAGE[language] + (_RACES if races else ())
    text = _text(wrapped, language)
    name = hashlib.sha256("\0".join((*flags, text)).encode()).hexdigest()[:24]
    source = _written(f"{name}.cpp", text)
    # Without start files and sanitizer libraries, the library's only variables are the kernel's.
    link = ("-shared", "-nostdlib", str(source), "-lm", "-lgcc")
    header = str(_header(language, flags, races))
    return _once(source.with_suffix(".so"), *flags, "-include", header, *link)


def refused_by_clang(wrapped: Wrapped) -> str:
    """Return clang's errors for a Metal text, with address spaces as parts of types; "" if none.

    Like Metal's own compiler, this is clang for C++14.
    """
    path = _folder() / f"{hashlib.sha256(wrapped.text.encode()).hexdigest()[:24]}.metal.cpp"
    # Only Apple's clang accepts attributes after `template`.
    path.write_text(re.sub(r"^template \[\[.*\]\] ", "template ", wrapped.text, flags=re.MULTILINE))
    clang = find_clang()
    assert clang is not None
    return _clang(clang, "-include", str(SHIM / "spaces.h"), str(path))


@functools.cache
def find_clang() -> str | None:
    """Return the path of a clang that supports both half formats here: 17 or newer."""
    path = _folder() / "halves.cpp"
    path.write_text("float widened(__bf16 x, _Float16 y) { return float(x) + float(y); }\n")
    names = ("clang++", *(f"clang++-{version}" for version in range(30, 16, -1)))
    installed = (found for name in names if (found := shutil.which(name)))
    return next((clang for clang in installed if not _clang(clang, str(path))), None)


def _clang(clang: str, *arguments: str) -> str:
    """Return clang's errors for a file; "" if none."""
    flags = ("-std=c++14", "-nostdinc", "-Wno-unknown-attributes", "-Wno-ignored-attributes")
    command = [clang, *flags, "-fsyntax-only", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def _text(wrapped: Wrapped, language: Language) -> str:
    """Return MLX's text, with line numbers that start at the body, and then the entry function."""
    before = wrapped.body_line - 1
    lines = wrapped.text.split("\n")
    front, rest = "\n".join(lines[:before]), "\n".join(lines[before:])
    return f'#line 1 "signature"\n{front}\n#line 1 "body"\n{rest}\n{_entry(wrapped, language)}'


def _entry(wrapped: Wrapped, language: Language) -> str:
    """Return the function that the runner calls once per thread."""
    given = []
    for index, buffer in enumerate(wrapped.buffers):
        kind, sign = buffer.type, "const "
        if language == "cuda" and buffer.role in ("shape", "strides"):
            kind = f"mlx::core::cu::{'Shape' if buffer.role == 'shape' else 'Strides'}"
        by_value = language == "cuda" and buffer.role in ("shape", "strides", "ndim")
        if buffer.role == "output":
            sign = ""
        star = "*" if buffer.by_reference or by_value else ""
        if language == "cuda" and buffer.role == "input":
            star = ""
        given.append(f"{star}static_cast<{sign}{kind}*>(buffers[{index}])")
    given += [f"shim::{about}()" for about in wrapped.attributes]
    call = f"{wrapped.call}({', '.join(given)})"
    return f'#line 1 "entry"\nextern "C" void shim_entry(void* const* buffers) {{ {call}; }}\n'


def line_of(path: Path, offset: int) -> int | None:
    """Return the line of the kernel's body for an address in its library, or None."""
    tool = shutil.which("addr2line")
    if tool is None:
        return None
    command = [tool, "-e", str(path), "-i", hex(offset)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for place in output.splitlines():
        file, _, line = place.rpartition(":")
        if file.endswith("body") and line.split()[0].isdigit():
            return int(line.split()[0])
    return None
