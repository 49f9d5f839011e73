"""Tokens that grammars force: how many there are, and how many could share a step.

A token is forced if the grammar allows no other one. A step could take several tokens of a row at
once if they are known before it is launched: the forced tokens that follow another forced one.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np

from bench.masks import CLOSING, KINDS, RANDOM_SCHEMAS, answer_grammar
from kvd.worker.grammar.compiler import Compiler
from kvd.worker.grammar.matcher import MaskFiller, Matcher
from kvd.worker.grammar.vocabulary import Vocabulary
from protocol.tools import Grammar
from tests.worker.grammar.json_schemas import random_schema


class Walk:
    """Random answers over a model's own vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler = Compiler(lambda: vocabulary)
        self._filler = MaskFiller(len(vocabulary.tokens))
        self._closing = np.array([any(one in word for one in b'"]}') for word in vocabulary.tokens])

    def follow(self, grammar: Grammar, steps: int, seed: int) -> Counter[str]:
        """Count the tokens of one random answer; see `measure`."""
        compilation = self._compiler.start(
            answer_grammar(grammar, canonical=self._vocabulary.canonical)
        )
        if not compilation.done.wait(60) or compilation.error is not None:
            raise SystemExit(f"{grammar} was not compiled: {compilation.error}")
        matcher: Matcher = self._compiler.matcher(compilation)
        chance, found, known = random.Random(seed), Counter[str](), list[int]()
        for _ in range(steps):
            (mask,) = self._filler.fill([matcher])
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if not allowed.size:
                break
            found["tokens"] += 1
            found["forced"] += allowed.size == 1
            if known:
                found["known"] += 1
                found["different"] += allowed.tolist() != known[:1]
                del known[0]
            elif allowed.size == 1:
                known = list(matcher.grammar.compute_ff_tokens())
                found["different"] += known[:1] not in ([], allowed.tolist())
                del known[:1]
            closing = allowed[self._closing[allowed]]
            may_close = closing.size and chance.random() < CLOSING
            token = int(chance.choice(closing if may_close else allowed))
            if token in self._vocabulary.eos_ids:
                break
            matcher.push(token)
        return found


def measure(vocabulary: Vocabulary, steps: int = 400) -> dict[str, Any]:
    """Return, by kind of grammar, the tokens of random answers and the shares of forced ones.

    ``forced``: the share of tokens whose mask allows no other one. ``known``: the share that
    llguidance names with an earlier forced token. ``different``: tokens that it names and that
    differ from the masks.
    """
    walk = Walk(vocabulary)
    found = {name: walk.follow(one, steps, 1) for name, one in KINDS.items()}
    mixed = Counter[str]()
    for seed in range(RANDOM_SCHEMAS):
        schema = Grammar("json_schema", json.dumps(random_schema(seed)))
        mixed += walk.follow(schema, 60, seed)
    found[f"{RANDOM_SCHEMAS} random schemas"] = mixed
    return {name: _shares(counts) for name, counts in found.items()}


def _shares(counts: Counter[str]) -> dict[str, float]:
    tokens = max(1, counts["tokens"])
    return {
        "tokens": counts["tokens"],
        "forced": round(counts["forced"] / tokens, 3),
        "known": round(counts["known"] / tokens, 3),
        "different": counts["different"],
    }
