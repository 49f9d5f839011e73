"""What the fake model says: tokens, their words and their logprobs, from a request alone.

Tokens are bytes. Each is a hash of prompt, seed, choice and position; logprobs are made up, but
those of a place are of one distribution: each token has a rank there, and half the probability of
the one before it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from protocol.types import Alternative, TokenLogprob

VOCABULARY = 256
_SYLLABLES = [consonant + vowel for consonant in "bdkl" for vowel in "aeio"]
_STRIDE = 37
"""From one rank to the next; odd, so that every token has one rank."""
_MOST_ATTEMPTS = 64
"""At a token that is allowed; then the first one that is."""


@dataclass(frozen=True)
class Story:
    """All that a prompt and a seed will ever give. Seed 0 is greedy: its choices are the same."""

    prompt: bytes
    """One token each."""
    seed: int

    def token(self, choice: int, place: int, barred: frozenset[int] = frozenset()) -> int:
        """Return a completion's token, none of the barred ones unless there are no others."""
        number = choice if self.seed else 0
        for attempt in range(_MOST_ATTEMPTS):
            more = b" %d %d" % (number, attempt) if number or attempt else b""
            token = _digest(b"%d %d " % (self.seed, place) + self.prompt + more)
            if token not in barred:
                return token
        return next((one for one in range(VOCABULARY) if one not in barred), token)

    def told(self, token: int, place: int, top: int) -> TokenLogprob:
        """Return a token's logprob at a place; places of the prompt are negative."""
        rank = 0
        if self.seed:
            rank = _digest(b"%d %d %d " % (self.seed, place, token) + self.prompt) % 4
        likely = [(token + _STRIDE * (other - rank)) % VOCABULARY for other in range(top)]
        others = [
            Alternative(one, " " + word(one), _logprob_at(at)) for at, one in enumerate(likely)
        ]
        return TokenLogprob(token, " " + word(token), _logprob_at(rank), None, others)

    def told_prompt(self, top: int) -> list[TokenLogprob]:
        """Return the same of the prompt's tokens; the first has no logprob."""
        first = TokenLogprob(self.prompt[0], " " + word(self.prompt[0]))
        rest = enumerate(self.prompt[1:], 1)
        return [first, *(self.told(token, -place, top) for place, token in rest)]


def word(token: int) -> str:
    """Return the word that a token is shown as, after a space."""
    return _SYLLABLES[token // 16] + _SYLLABLES[token % 16]


def _digest(story: bytes) -> int:
    return hashlib.blake2b(story, digest_size=1).digest()[0]


def _logprob_at(rank: int) -> float:
    return -(rank + 1) * math.log(2.0)
