"""Makes prompts with an exact number of tokens.

Prompts are random words, so two prompts have equal beginnings only where the trace asks for that,
and a server's prompt cache helps only there. Prompts are texts and not token ids, because
`/v1/completions` of mlx_lm.server takes only texts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence

from kvd.bench.traces import Trace

Encode = Callable[[str], Sequence[int]]
"""Encodes a text without adding special tokens."""


class Prompts:
    """Makes texts for one tokenizer."""

    def __init__(self, encode: Encode, words: Iterable[str], *, exact: bool = True) -> None:
        """Take a tokenizer and words.

        ``exact``: raise ValueError if no word is a single token, or, in `text`, if the tokenizer
        merges words.
        """
        self._encode = encode
        self._exact = exact
        self._cost = {word: len(encode(word)) for word in sorted({f" {w}" for w in words})}
        self._words = list(self._cost)
        self._single = [word for word, cost in self._cost.items() if cost == 1]
        if not self._single and exact:
            raise ValueError("no word of the list is one token in this model's vocabulary")

    def text(self, rng: random.Random, tokens: int) -> str:
        """Return a text of ``tokens`` tokens; without `exact`, of a few more or less."""
        words: list[str] = []
        left = tokens
        while left > 0:
            word = rng.choice(self._words)
            if self._cost[word] > left:
                word = rng.choice(self._single or self._words)
            words.append(word)
            left -= self._cost[word]
        text = "".join(words)
        if self._exact and (found := len(self._encode(text))) != tokens:
            raise ValueError(
                f"words of {tokens} tokens in all have {found} tokens as one text: this tokenizer"
                " merges words, so prompts of an exact length cannot be made"
            )
        return text

    def of(self, trace: Trace, seed: int, run: int) -> list[str]:
        """Return the prompts of a trace, which differ from run to run."""
        rng = random.Random(f"{trace.name} {seed} {run} words")
        common = self.text(rng, max(ask.shared for ask in trace.asks))
        if len({ask.shared for ask in trace.asks}) > 1:
            raise ValueError("all requests of a trace must have the same number of shared tokens")
        return [common + self.text(rng, ask.prompt) for ask in trace.asks]


def words_of(text: str) -> list[str]:
    """Return the distinct lower-case words of a text."""
    return sorted(set(re.findall(r"\b[a-z]{3,12}\b", text)))
