"""The part of a kernel's text that turns eight packed numbers into floats.

MLX packs numbers of 2, 3, 4, 5, 6 or 8 bits one after another, little-endian. So eight of them, a
*run*, have as many bytes as a number has bits. A run of 3, 5 or 6 bits can begin at any byte of a
word, so the two words that contain it are read and shifted. A number is masked out of its word,
usually without a shift. The result is the number times a power of two, which is divided out where
that costs least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.attention.kernels.text import RUN, Text

_EXACT = 23
"""A number within this many low bits of a word converts to a float exactly, even to a denormal one.
"""
_WHOLE = {
    2: ("ushort", "word0 = now[from]"),
    4: ("uint", "word0 = now[from]"),
    8: ("uint2", "word0 = now[from].x, word1 = now[from].y"),
}
"""Runs that are one element: its type, and the words in it."""


def find_run(number: str, size: int) -> str:
    """Return code that finds one of the runs of a line; the line begins at the start of a word.

    It declares the index of the element in which the run begins, its first bit there, and whether
    it ends in the next element. ``size``: elements in four runs.
    """
    return f"""
const int place = {number} * {size} / 4, start_bit = {number} * {size} % 4 * 8;
const int more = ({number} * {size} + {size} - 1) / 4 - place;
"""


@dataclass(frozen=True)
class Run:
    """How eight numbers are read."""

    kind: str
    """Type of the elements that are read."""
    count: int
    """Elements that are read per run."""
    size: int
    """Elements in four runs: fewer than are read if runs share elements."""
    setup: str
    """Statement that combines the elements (``now[from]`` and following) into words."""
    numbers: tuple[str, ...]
    shifts: tuple[int, ...]
    """For each number, the exponent of the power of two that it arrives multiplied by, apart from
    the language's unit; 0 for dense elements."""
    packed: bool

    @property
    def batch(self) -> int:
        """Runs that a lane loads at once, into 16 registers."""
        return 16 // ({"uint2": 2, "uint4": 4}.get(self.kind, 1) * self.count)

    def add_to(self, text: Text, use: Callable[[int, str], str]) -> None:
        """Add the code that reads a run; ``use`` returns code for a number's index and name."""
        text.add(self.setup)
        for number, expression in enumerate(self.numbers):
            text.add(f"const float n{number} = {expression};")
            text.add(use(number, f"n{number}"))

    def add_stream(
        self, text: Text, steps: int, stride: str, first: str, use: Callable[[int, str], str]
    ) -> None:
        """Add a loop over runs that loads the next ones while it computes with the current ones.

        The kernel's ``runs`` points to the lane's first run; the next ones follow at distances of
        ``stride`` runs, a multiple of 4. ``first`` is the code before that of ``use`` in each
        ``step``.
        """
        batch = max(size for size in range(1, self.batch + 1) if steps % size == 0)
        text.add(f"""
{{
constexpr int STEPS = {steps}, BATCH = {batch}, STRIDE = {stride} * {self.size} / 4;
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
        self.add_read(text, "ahead", f"at * {self.count}", "at * STRIDE")
        text.add("}")

    def add_read(self, text: Text, into: str, index: str, place: str) -> None:
        """Add the code that reads the run at ``runs[place]`` into an array of elements."""
        shared = self.size < 4 * self.count
        for part in range(self.count):
            offset = "more" if shared and part else str(part)
            text.add(f"{into}[{index} + {part}] = runs[{place} + {offset}];")


def packed_run(bits: int) -> Run:
    if bits in _WHOLE:
        (kind, words), count, size = _WHOLE[bits], 1, 4
    else:
        kind, count, size = "uint", 2, bits
        words = "word0 = ALIGN(now[from], now[from + 1], start_bit)"
        if bits > 4:
            words += ", word1 = now[from + 1] >> start_bit"
    numbers, shifts = [], []
    for index in range(RUN):
        expression, shift = _place(index * bits, bits)
        if shift + bits > _EXACT:
            down = min(shift, 16)
            expression, shift = f"({expression} >> {down})", shift - down
        numbers.append(f"NUMBER({expression} & {((1 << bits) - 1) << shift:#x}u)")
        shifts.append(shift)
    return Run(
        kind, count, size, f"const uint {words};", tuple(numbers), tuple(shifts), packed=True
    )


def _place(bit: int, bits: int) -> tuple[str, int]:
    """Return an expression for a word that contains a number, and the number's lowest bit in it."""
    word, shift = divmod(bit, 32)
    if shift + bits <= 32:
        return f"word{word}", shift
    return f"((word{word} >> {shift}) | (word{word + 1} << {32 - shift}))", 0


def dense_run(dtype: mx.Dtype) -> Run:
    if dtype == mx.float32:
        count = 2
        setup = "const uint4 low = now[from], high = now[from + 1];"
        numbers = [f"BITS({half}.{part})" for half in ("low", "high") for part in "xyzw"]
    else:
        count = 1
        setup = "const uint4 eight = now[from];"
        numbers = [f"{side}(eight.{part})" for part in "xyzw" for side in ("LOW", "HIGH")]
    return Run("uint4", count, 4 * count, setup, tuple(numbers), (0,) * RUN, packed=False)
