"""Random key of each draw: a hash of the request's seed, the choice and the token's position.

Integers only. A draw depends on nothing else, so it is the same in any batch and after a resume.
"""

from __future__ import annotations

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
"""Constant of splitmix64: the golden ratio as an odd number."""
_STREAMS = 0xD1342543DE82EF95
"""Separates choices. With another odd multiplier (Steele and Vigna 2021), no choice of one seed
equals a position of another."""


def key_of(seed: int, position: int, choice: int = 0) -> tuple[int, int]:
    """Return the random key of one token: two words of 32 bits."""
    # The seed is mixed first. Otherwise seeds that differ by the gamma of splitmix64 would give
    # the same stream, shifted by one position.
    stream = _mix(seed)
    if choice:
        stream = _mix(stream ^ (choice * _STREAMS))
    word = _mix(stream + (position + 1) * _GAMMA)
    return word >> 32, word & 0xFFFFFFFF


def _mix(word: int) -> int:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
