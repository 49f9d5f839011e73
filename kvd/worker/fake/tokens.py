"""Tokens of the fake model, their text and their logprobs, as functions of the request alone.

Tokens are bytes. Each is a hash of prompt, seed, choice and position. Logprobs are invented but
consistent: at each position every token has a rank, and each rank is half as likely as the rank
before it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from protocol.types import Alternative, TokenLogprob

VOCABULARY = 256
_SYLLABLES = [consonant + vowel for consonant in "bdkl" for vowel in "aeio"]
_STRIDE = 37
"""Distance in token ids between ranks; odd, so that every token has exactly one rank."""
_MAX_ATTEMPTS = 64
"""Hashes tried for an allowed token before the lowest allowed id is taken."""


@dataclass(frozen=True)
class FakeTokens:
    """The tokens for one prompt and seed. Seed 0 is greedy: all choices are equal."""

    prompt: bytes
    seed: int

    def token(self, choice: int, position: int, excluded: frozenset[int] = frozenset()) -> int:
        """Return a completion's token; an excluded one only if all tokens are excluded."""
        number = choice if self.seed else 0
        for attempt in range(_MAX_ATTEMPTS):
            more = b" %d %d" % (number, attempt) if number or attempt else b""
            token = _digest(b"%d %d " % (self.seed, position) + self.prompt + more)
            if token not in excluded:
                return token
        return next((token for token in range(VOCABULARY) if token not in excluded), token)

    def token_logprob(self, token: int, position: int, top: int) -> TokenLogprob:
        """Return a token's logprob with the ``top`` most likely ones.

        ``position``: negative for prompt tokens.
        """
        rank = 0
        if self.seed:
            rank = _digest(b"%d %d %d " % (self.seed, position, token) + self.prompt) % 4
        likely = [(token + _STRIDE * (other - rank)) % VOCABULARY for other in range(top)]
        others = [
            Alternative(other, " " + word(other), _logprob_at(at))
            for at, other in enumerate(likely)
        ]
        return TokenLogprob(token, " " + word(token), _logprob_at(rank), None, others)

    def prompt_logprobs(self, top: int) -> list[TokenLogprob]:
        first = TokenLogprob(self.prompt[0], " " + word(self.prompt[0]))
        rest = enumerate(self.prompt[1:], 1)
        return [first, *(self.token_logprob(token, -position, top) for position, token in rest)]


def word(token: int) -> str:
    """Return a token's text, without the space before it."""
    return _SYLLABLES[token // 16] + _SYLLABLES[token % 16]


def _digest(text: bytes) -> int:
    return hashlib.blake2b(text, digest_size=1).digest()[0]


def _logprob_at(rank: int) -> float:
    return -(rank + 1) * math.log(2.0)
