"""The part of a kernel's text that turns eight packed numbers into floats.

MLX packs numbers of 2, 3, 4, 5, 6 or 8 bits one after another, little-endian. So eight of them, a
*run*, have as many bytes as a number has bits. A number is masked out of its word, usually without
a shift. The result is the number times a power of two, which is divided out where that costs least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.attention.kernels.text import RUN, Text

_EXACT = 23
"""A number within this many low bits of a word converts to a float exactly, even to a denormal one.
"""
_LOADS = {
    2: ("ushort", 1),
    3: ("uchar", 3),
    4: ("uint", 1),
    5: ("uchar", 5),
    6: ("ushort", 3),
    8: ("uint2", 1),
}
"""How a run is read: a type, and how many of it. Runs are aligned to this type only."""
_BYTES = {"uchar": 1, "ushort": 2}


@dataclass(frozen=True)
class Run:
    """How eight numbers are read."""

    kind: str
    count: int
    setup: tuple[str, ...]
    """Statements that combine the loaded elements (``now[from]`` and following) into words."""
    numbers: tuple[str, ...]
    shifts: tuple[int, ...]
    """For each number, the exponent of the power of two that it arrives multiplied by, apart from
    the language's unit; 0 for dense elements."""
    packed: bool

    @property
    def batch(self) -> int:
        """Runs that a lane loads at once: 64 bytes, fewer if runs are not aligned to words."""
        size = {"uint": 4, "uint2": 8, "uint4": 16}.get(self.kind, 8)
        return max(2, 64 // (size * self.count))

    def add_to(self, text: Text, use: Callable[[int, str], str]) -> None:
        """Add the code that reads a run; ``use`` returns code for a number's index and name."""
        for line in self.setup:
            text.add(line)
        for number, expression in enumerate(self.numbers):
            text.add(f"const float n{number} = {expression};")
            text.add(use(number, f"n{number}"))

    def add_stream(
        self, text: Text, steps: int, stride: str, first: str, use: Callable[[int, str], str]
    ) -> None:
        """Add a loop over runs that loads the next ones while it computes with the current ones.

        The kernel's ``runs`` points to the lane's first run; the next ones follow at distances of
        ``stride``. ``first`` is the code before that of ``use`` in each ``step``.
        """
        batch = max(size for size in range(1, self.batch + 1) if steps % size == 0)
        text.add(f"""
{{
constexpr int STEPS = {steps}, BATCH = {batch}, STRIDE = {stride} * {self.count};
{self.kind} ahead[BATCH * {self.count}];
""")
        self._read(text)
        text.add(f"""
#pragma unroll 1
for (int begin = 0; begin < STEPS; begin += BATCH) {{
{self.kind} now[BATCH * {self.count}];
#pragma unroll
for (int at = 0; at < BATCH * {self.count}; ++at) now[at] = ahead[at];
if (begin + BATCH < STEPS) {{
runs += BATCH * STRIDE;
""")
        self._read(text)
        text.add(f"""
}}
#pragma unroll
for (int at = 0; at < BATCH; ++at) {{
const int step = begin + at, from = at * {self.count};
{first}
""")
        self.add_to(text, use)
        text.add("}\n}\n}")

    def _read(self, text: Text) -> None:
        text.add("#pragma unroll\nfor (int at = 0; at < BATCH; ++at) {")
        for part in range(self.count):
            text.add(f"ahead[at * {self.count} + {part}] = runs[at * STRIDE + {part}];")
        text.add("}")


def packed_run(bits: int) -> Run:
    kind, count = _LOADS[bits]
    if kind == "uint2":
        setup = ["const uint word0 = now[from].x, word1 = now[from].y;"]
    elif kind == "uint":
        setup = ["const uint word0 = now[from];"]
    else:
        size = 8 * _BYTES[kind]
        words: dict[int, list[str]] = {}
        for index in range(count):
            word, shift = divmod(index * size, 32)
            piece = f"uint(now[from + {index}])"
            words.setdefault(word, []).append(f"({piece} << {shift})" if shift else piece)
        setup = [f"const uint word{word} = {' | '.join(parts)};" for word, parts in words.items()]
    numbers, shifts = [], []
    for index in range(RUN):
        expression, shift = _place(index * bits, bits)
        if shift + bits > _EXACT:
            down = min(shift, 16)
            expression, shift = f"({expression} >> {down})", shift - down
        numbers.append(f"NUMBER({expression} & {((1 << bits) - 1) << shift:#x}u)")
        shifts.append(shift)
    return Run(kind, count, tuple(setup), tuple(numbers), tuple(shifts), packed=True)


def _place(bit: int, bits: int) -> tuple[str, int]:
    """Return an expression for a word that contains a number, and the number's lowest bit in it."""
    word, shift = divmod(bit, 32)
    if shift + bits <= 32:
        return f"word{word}", shift
    return f"((word{word} >> {shift}) | (word{word + 1} << {32 - shift}))", 0


def dense_run(dtype: mx.Dtype) -> Run:
    if dtype == mx.float32:
        count = 2
        setup = ("const uint4 low = now[from], high = now[from + 1];",)
        numbers = [f"BITS({half}.{part})" for half in ("low", "high") for part in "xyzw"]
    else:
        count = 1
        setup = ("const uint4 eight = now[from];",)
        numbers = [f"{side}(eight.{part})" for part in "xyzw" for side in ("LOW", "HIGH")]
    return Run("uint4", count, setup, tuple(numbers), (0,) * RUN, packed=False)
