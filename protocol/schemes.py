"""KV schemes such as ``k8v4``: bits of keys and values, and the elements that share a scale."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

Bits = Literal[2, 3, 4, 5, 6, 8, 16]
KeyGroup = Literal[32, 64]
"""Keys are quantized along a page's 64 tokens, so no group is longer."""
ValueGroup = Literal[32, 64, 128]
DEFAULT_GROUP = 64

BITS: tuple[int, ...] = get_args(Bits)
K_GROUPS: tuple[int, ...] = get_args(KeyGroup)
V_GROUPS: tuple[int, ...] = get_args(ValueGroup)
_NAME = re.compile(r"\s*k(\d+)(?:g(\d+))?v(\d+)(?:g(\d+))?\s*", re.IGNORECASE)
_SCALE_BITS = 32
"""Bits of a group's scale and bias together, in half precision as on accelerators."""


@dataclass(frozen=True)
class Scheme:
    """Bits and group sizes of keys and values. 16 bits mean "not quantized", without a group.

    ``k_group`` is 32 or 64, ``v_group`` is 32, 64 or 128. Raises ``ValueError`` for other values.
    """

    k_bits: int = 8
    v_bits: int = 8
    k_group: int = DEFAULT_GROUP
    v_group: int = DEFAULT_GROUP

    def __post_init__(self) -> None:
        for side, bits, group, groups in (
            ("key", self.k_bits, self.k_group, K_GROUPS),
            ("value", self.v_bits, self.v_group, V_GROUPS),
        ):
            if bits not in BITS:
                raise ValueError(f"{side} bits must be one of {_listed(BITS)}, not {bits}")
            if bits < 16 and group not in groups:
                raise ValueError(f"the {side} group must be one of {_listed(groups)}, not {group}")
        # Schemes that differ only in the group of a side that is not quantized are equal.
        if self.k_bits == 16:
            object.__setattr__(self, "k_group", DEFAULT_GROUP)
        if self.v_bits == 16:
            object.__setattr__(self, "v_group", DEFAULT_GROUP)

    @classmethod
    def parse(cls, text: str, k_group: int = DEFAULT_GROUP, v_group: int | None = None) -> Scheme:
        """Parse ``k8v4``, ``k4v4g32`` (one group size) or ``k4g32v4g128`` (two).

        ``k_group`` and ``v_group`` (default: ``k_group``) apply to names without a group.
        Raises ``ValueError`` with a message for users.
        """
        found = _NAME.fullmatch(text)
        if found is None or (found[2] and not found[4]):
            raise ValueError(
                f"{text[:40]!r} is no KV scheme; write it like k8v4, k4v4g32 (groups of 32) or "
                "k4g32v4g128"
            )
        k_bits, v_bits = int(found[1]), int(found[3])
        k_group, v_group = groups_in(text) or (k_group, v_group or k_group)
        try:
            return cls(k_bits, v_bits, k_group, v_group)
        except ValueError as error:
            raise ValueError(f"{text[:40]!r} is no KV scheme: {error}") from None

    @property
    def name(self) -> str:
        groups = {
            group
            for bits, group in ((self.k_bits, self.k_group), (self.v_bits, self.v_group))
            if bits < 16
        }
        if len(groups) > 1:
            return f"k{self.k_bits}g{self.k_group}v{self.v_bits}g{self.v_group}"
        suffix = "".join(f"g{group}" for group in groups - {DEFAULT_GROUP})
        return f"k{self.k_bits}v{self.v_bits}{suffix}"

    @property
    def costs(self) -> tuple[float, float]:
        """Bits per element of keys and of values, including their share of the scales."""
        return _cost(self.k_bits, self.k_group), _cost(self.v_bits, self.v_group)

    def is_below(self, other: Scheme) -> bool:
        """Return whether this scheme takes fewer bytes for keys or values, and more for neither.

        A step down that gave keys or values more bits would cost bytes, and the precision that they
        have lost would not come back.
        """
        (k, v), (other_k, other_v) = self.costs, other.costs
        return k <= other_k and v <= other_v and (k, v) != (other_k, other_v)

    def at_least(self, floor: Scheme) -> Scheme:
        """Return this scheme, with the floor's keys or values where those take more bits."""
        (k, v), (floor_k, floor_v) = self.costs, floor.costs
        keys, values = (self if k >= floor_k else floor), (self if v >= floor_v else floor)
        return Scheme(keys.k_bits, values.v_bits, keys.k_group, values.v_group)

    def at_most(self, ceiling: Scheme) -> Scheme:
        """Return this scheme, with the ceiling's keys or values where those take fewer bits."""
        (k, v), (top_k, top_v) = self.costs, ceiling.costs
        keys, values = (self if k <= top_k else ceiling), (self if v <= top_v else ceiling)
        return Scheme(keys.k_bits, values.v_bits, keys.k_group, values.v_group)


def groups_in(name: str) -> tuple[int, int] | None:
    """Return the group sizes of keys and values in a scheme's name; None if it names none."""
    found = _NAME.fullmatch(name)
    return (int(found[2] or found[4]), int(found[4])) if found and found[4] else None


def _cost(bits: int, group: int) -> float:
    return float(bits) if bits == 16 else bits + _SCALE_BITS / group


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
