"""CPU times of masks over a large vocabulary, by kind of grammar and by allowed tokens.

    python -m bench.masks [--tokenizer TOKENIZER_JSON] [--json FILE]

Without a tokenizer, the vocabulary is random. With one, it is that of a byte-level BPE;
`make clients` installs Qwen3's.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.report import machine, publish
from kvd.worker.grammar.answers import AnswerContext, AnswerGrammar, write_grammar
from kvd.worker.grammar.compiler import Compilation, Compiler
from kvd.worker.grammar.matcher import MaskFiller, Matcher
from kvd.worker.grammar.vocabulary import Vocabulary
from kvd.worker.text.detokenizer import bytes_of
from protocol.tools import Grammar
from protocol.types import Sampling
from protocol.worker import Submit
from tests.worker.grammar.json_schemas import random_schema

VOCABULARY = 151_936
RANDOM_SCHEMAS = 200
CLOSING = 0.3
"""Share of the drawn tokens that end a text or an array if one of them may follow, as in answers of
models. Of all tokens, almost none does."""
SIZES = {"few": 100, "some": 10_000, "most": VOCABULARY}
"""Names of masks by the most tokens that they allow."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def _list(items: object) -> Grammar:
    return Grammar("json_schema", json.dumps({"type": "array", "items": items, "minItems": 999}))


def _objects(count: int) -> dict[str, Any]:
    properties = {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": f"kind-{number}"}, **properties},
                "required": ["kind", "name"],
                "additionalProperties": False,
            }
            for number in range(count)
        ]
    }


LONG = _list(PERSON)
KINDS: Mapping[str, Grammar] = {
    "persons": LONG,
    "any JSON": _list({"type": "object"}),
    "free texts": _list({"type": "string"}),
    "texts up to 12": _list({"type": "string", "maxLength": 12}),
    "texts up to 100": _list({"type": "string", "maxLength": 100}),
    "names by a pattern": _list({"type": "string", "pattern": "^[a-z][a-z0-9-]{0,62}$"}),
    "dates": _list({"type": "string", "format": "date-time"}),
    "numbers": _list({"type": "number", "minimum": -7, "maximum": 4321}),
    "choices of 300": _list({"enum": [f"{number * 7919 % 1000}-choice" for number in range(300)]}),
    "objects of 30 kinds": _list(_objects(30)),
}


def pieces(count: int) -> list[bytes]:
    """Return the bytes of random tokens: single bytes, words with and without space, digits."""
    chance = random.Random(0)
    found = {bytes([one]): None for one in range(256)}
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    while len(found) < count:
        word = "".join(chance.choices(letters, k=chance.randint(2, 9)))
        kind = chance.random()
        if kind < 0.02:
            word = str(chance.randrange(1000))
        elif kind < 0.06:
            word = "".join(chance.choices('{}[]":,.;()<>/\\=-+ \n\t', k=chance.randint(2, 4)))
        elif kind < 0.15:
            word = "".join(map(chr, chance.choices(range(0x400, 0x9FFF), k=chance.randint(1, 3))))
        found[(" " * (chance.random() < 0.5) + word).encode()] = None
    return list(found)


def pieces_of(file: Path) -> list[bytes]:
    """Return the bytes of a byte-level tokenizer's tokens, without added ones."""
    tokenizer = Tokenizer.from_file(str(file))
    count = tokenizer.get_vocab_size(with_added_tokens=False)
    names = (tokenizer.id_to_token(token) for token in range(count))
    return [bytes_of("" if name is None else name) for name in names]


class Measurement:
    """Masks of completions by many grammars, one row at a time."""

    def __init__(self, words: Sequence[bytes]) -> None:
        eos = len(words)
        vocabulary = Vocabulary(
            [*words, b"<end>"], frozenset({eos}), frozenset({eos}), lambda _: [], canonical=False
        )
        self._compiler = Compiler(lambda: vocabulary)
        start = time.perf_counter()
        with self._compiler.preparing():
            pass
        self.tokenizer_s = time.perf_counter() - start
        self._filler = MaskFiller(eos + 1)
        self._closing = np.array([any(one in word for one in b'"]}') for word in words] + [True])
        self.seconds: dict[str, list[float]] = {name: [] for name in SIZES}

    def follow(self, grammar: Grammar, steps: int, seed: int) -> list[float]:
        """Return the seconds of the masks of an answer's first tokens, except the first one."""
        compilation = self._compile(grammar)
        chance, found = random.Random(seed), list[float]()
        matcher: Matcher = self._compiler.matcher(compilation)
        for number in range(steps):
            start = time.thread_time()  # other processes do not count
            (mask,) = self._filler.fill([matcher])
            took = time.thread_time() - start
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if not allowed.size:
                break
            if number:
                found.append(took)
                size = next(name for name, most in SIZES.items() if allowed.size <= most)
                self.seconds[size].append(took)
            closing = allowed[self._closing[allowed]]
            may_close = closing.size and chance.random() < CLOSING
            token = int(chance.choice(closing if may_close else allowed))
            if token == len(self._closing) - 1:
                break
            matcher.push(token)
        return found

    def _compile(self, grammar: Grammar) -> Compilation:
        compilation = self._compiler.start(answer_grammar(grammar))
        if not compilation.done.wait(60) or compilation.error is not None:
            raise SystemExit(f"{grammar} was not compiled: {compilation.error}")
        return compilation


def measure(words: Sequence[bytes] | None = None, steps: int = 400) -> dict[str, Any]:
    """Return CPU times of masks, in milliseconds.

    ``words``: the bytes of all tokens; None: those of `VOCABULARY` random ones.
    """
    words = pieces(VOCABULARY - 1) if words is None else words
    measurement = Measurement(words)
    kinds = {name: measurement.follow(one, steps, 1) for name, one in KINDS.items()}
    mixed: list[float] = []
    for seed in range(RANDOM_SCHEMAS):
        schema = Grammar("json_schema", json.dumps(random_schema(seed)))
        mixed += measurement.follow(schema, 40, seed)
    kinds[f"{RANDOM_SCHEMAS} random schemas"] = mixed
    seconds = [one for found in kinds.values() for one in found]
    return {
        "vocabulary": len(words) + 1,
        "tokenizer_s": round(measurement.tokenizer_s, 3),
        "all_ms": _summary(seconds),
        "by_kind_ms": {name: _summary(found) for name, found in kinds.items()},
        "by_allowed_tokens_ms": {
            name: _summary(found) for name, found in measurement.seconds.items() if found
        },
    }


def _summary(seconds: list[float]) -> dict[str, float]:
    ordered, size = sorted(seconds), len(seconds)
    at = {"median": size // 2, "p99": int(0.99 * size), "longest": size - 1}
    return {"masks": size, **{name: round(1e3 * ordered[one], 3) for name, one in at.items()}}


def answer_grammar(grammar: Grammar, *, canonical: bool = False) -> AnswerGrammar:
    """Return the grammar of a whole answer; ``canonical``: see `Vocabulary`."""
    request = Submit(rid="r", prompt="x", sampling=Sampling(seed=0), grammar=grammar)
    return write_grammar(request, AnswerContext(), canonical=canonical)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.masks")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of a byte-level BPE")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    asked = parser.parse_args()
    words = None if asked.tokenizer is None else pieces_of(asked.tokenizer)
    name = "random" if asked.tokenizer is None else asked.tokenizer.parent.parent.name
    report = {"tokenizer": name, "machine": machine()} | measure(words)
    publish(report, asked.json)


if __name__ == "__main__":
    main()
