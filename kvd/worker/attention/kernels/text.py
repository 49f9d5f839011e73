"""Assembles the text of a kernel."""

from __future__ import annotations

RUN = 8
"""Packed numbers that a lane reads at once."""


class Text:
    """Lines of a kernel.

    ``@`` stands for a component of a tile's vectors: a line that contains it is repeated for each
    component. ``#`` is the component's number.
    """

    def __init__(self, tile: int) -> None:
        self.vector = "float" if tile == 1 else f"float{tile}"
        self.integers = "int" if tile == 1 else f"int{tile}"
        self._parts = [("" if tile == 1 else f".{name}", str(n)) for n, name in enumerate("xyzw")]
        del self._parts[tile:]
        self._lines: list[str] = []

    def add(self, text: str) -> None:
        for line in text.strip("\n").split("\n"):
            if "@" in line:
                self._lines += [line.replace("@", name).replace("#", n) for name, n in self._parts]
            else:
                self._lines.append(line)

    def each(self, text: str) -> None:
        """Add lines for each number of a run; ``$`` is its index."""
        for number in range(RUN):
            self.add(text.replace("$", str(number)))

    def zero(self, *names: str) -> None:
        for name in names:
            self.add(f"{self.vector} {name};\n{name}@ = 0;")

    def scale(self, name: str, exponent: int) -> None:
        if exponent:
            self.add(f"{name}@ *= {power(exponent)};")

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"


def power(exponent: int) -> str:
    return f"0x1p{exponent}f"


def literal(value: float) -> str:
    return f"{float(value).hex()}f"
