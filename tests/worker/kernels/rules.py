"""Checks a kernel's source against Metal's limits, without compiling or running it.

The limits are those of Apple's GPU families 7 and newer (M1 and newer).
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from tests.worker.kernels.wrap import wrap

BUFFERS = 31
THREADS = 1024
THREADGROUP_MEMORY = 32 << 10
"""Bytes."""

_SIZES = {
    "bool": 1, "char": 1, "uchar": 1, "int8_t": 1, "uint8_t": 1,
    "half": 2, "float16_t": 2, "bfloat": 2, "bfloat16_t": 2, "short": 2, "ushort": 2,
    "int": 4, "uint": 4, "float": 4, "int32_t": 4, "uint32_t": 4,
    "long": 8, "ulong": 8, "int64_t": 8, "uint64_t": 8,
}  # fmt: skip
_ARRAY = re.compile(r"\bthreadgroup\s+(\w+)\s+(\w+)\s*((?:\[[^\]]*\]\s*)+);")
_SPACES = ("device", "constant", "threadgroup", "thread")
_POINTER = re.compile(r"(?:^|[;{}(])\s*((?:\w+\s+)*\w+)\s*[*&]\s*(\w+)\s*=")
_CONSTANTS = re.compile(r"\bconstexpr\s+(?:int|uint)\s+([^;]+);")


def check_rules(launch: Any) -> None:
    """Assert that Metal accepts a launch: limits, no double, an address space for each pointer."""
    source = _plain(launch.header + "\n" + launch.source)
    name = launch.name
    buffers = len(wrap(launch, "metal").buffers)
    assert buffers <= BUFFERS, f"{name}: {buffers} buffers, Metal takes {BUFFERS}"
    threads = prod(launch.threadgroup)
    assert threads <= THREADS, f"{name}: {threads} threads a threadgroup, at most {THREADS}"
    assert not re.search(r"\bthreadgroup\s+(?:const\s+)?\w+\s*[*&]", source), (
        f"{name}: a pointer into threadgroup memory, which the shim does not support"
    )
    used = threadgroup_memory(launch)
    assert used <= THREADGROUP_MEMORY, (
        f"{name}: {used} bytes of threadgroup memory, Metal has {THREADGROUP_MEMORY}"
    )
    assert not re.search(r"\bdouble\b", source), f"{name}: Metal has no double"
    for found in _POINTER.finditer(source):
        words = found[1].split()
        assert words[0] == "return" or any(space in words for space in _SPACES), (
            f"{name}: pointer '{found[2]}' names no address space: {found[0].strip()}"
        )


def threadgroup_memory(launch: Any) -> int:
    """Return the bytes of all `threadgroup T name[N];` of a launch, each aligned to 16."""
    source = _plain(launch.header + "\n" + launch.source)
    known = {key: value for key, value in launch.template if isinstance(value, int)}
    sizes = dict(_SIZES)
    for key, value in launch.template:
        if not isinstance(value, int):
            sizes[key] = value.size
    for several in _CONSTANTS.findall(source):
        for one in several.split(","):
            key, _, value = one.partition("=")
            known[key.strip()] = _number(value.strip(), known)
    total = 0
    for kind, _, lengths in _ARRAY.findall(source):
        elements = prod(_number(text, known) for text in re.findall(r"\[([^\]]*)\]", lengths))
        total += -(-elements * _size(kind, sizes) // 16) * 16
    declared = len(re.findall(r"\bthreadgroup\s", source))
    assert declared == len(_ARRAY.findall(source)), (
        f"{launch.name}: threadgroup memory that is no `threadgroup T name[N];`"
    )
    return total


def _size(kind: str, sizes: dict[str, int]) -> int:
    if kind in sizes:
        return sizes[kind]
    base, width = kind[:-1], int(kind[-1])  # vectors: uint3 takes the space of uint4
    return sizes[base] * (4 if width == 3 else width)


def _number(text: str, known: dict[str, int]) -> int:
    """Return a constant expression's value. Numbers are not negative, so `//` divides as in C."""
    return int(eval(text.replace("/", "//"), {"__builtins__": {}}, known))


def _plain(source: str) -> str:
    """Return the source without comments, with its argument-free macros expanded."""
    source = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    macros = dict(re.findall(r"^[ \t]*#define[ \t]+(\w+)[ \t]+(.*)$", source, re.MULTILINE))
    source = re.sub(r"^[ \t]*#.*$", "", source, flags=re.MULTILINE)
    return re.sub(r"\w+", lambda found: macros.get(found[0], found[0]), source)
