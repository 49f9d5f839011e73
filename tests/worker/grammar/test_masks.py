"""Masks against brute force: every token is tried with a copy of the matcher."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.grammar.answers import AnswerContext, write_grammar
from kvd.worker.grammar.compiler import NICENESS, Compiler
from kvd.worker.grammar.matcher import MaskFiller, Matcher
from kvd.worker.grammar.vocabulary import Vocabulary
from kvd.worker.text.text import Text
from protocol.tools import Grammar
from protocol.types import Sampling
from protocol.worker import Submit
from tests.worker.text.tokenizers_zoo import byte_level, wrap

TEXT = Text(wrap(byte_level()), vocab_size=512, context_length=512)
COMPILER = Compiler(TEXT.vocabulary)
LEAVES = [{"type": "integer"}, {"type": "string", "maxLength": 3}, {"enum": ["a", "ab", 1]}, {}]
SCHEMAS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "maxItems": 3}, inner),
        st.builds(lambda a, b: {"type": "object", "properties": {"x": a, "y": b}}, inner, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    ),
    max_leaves=4,
)
REGEXES = st.sampled_from(["[a-c]{2,4}", "(ab|abc|b)*", "[äöü]+x?", "the (quick|dog)s?"])
GRAMMARS = st.one_of(
    SCHEMAS.map(lambda schema: Grammar("json_schema", json.dumps(schema))),
    REGEXES.map(lambda text: Grammar("regex", text)),
)


@pytest.mark.parametrize("rows", [1, 3])
@settings(max_examples=15, deadline=None)
@given(grammar=GRAMMARS, seed=st.integers(0, 99))
def test_a_mask_allows_the_tokens_that_a_matcher_accepts(rows, grammar: Grammar, seed) -> None:
    matchers = [matcher_of(grammar) for _ in range(rows)]
    rng, filler = random.Random(seed), MaskFiller(512)
    for _ in range(8):
        masks = filler.fill([*matchers, None])
        assert masks[-1].all()
        for matcher, mask in zip(matchers, masks, strict=False):
            bits = np.unpackbits(mask, bitorder="little")[:512]
            tried = [matcher.grammar.validate_tokens([token]) == 1 for token in range(512)]
            others = [token for token in range(512) if token not in TEXT.eos_ids]
            assert [bool(bits[token]) for token in others] == [tried[token] for token in others]
            assert all(bits[end] == matcher.grammar.is_accepting() for end in TEXT.eos_ids)
            allowed = [token for token in others if bits[token]]
            if allowed:
                matcher.push(rng.choice(allowed))


@settings(max_examples=25, deadline=None)
@given(grammar=GRAMMARS, seed=st.integers(0, 9999))
def test_a_token_that_is_pushed_ahead_and_then_not_delivered_leaves_no_trace(
    grammar: Grammar, seed: int
) -> None:
    """As after a failed step, whose tokens are drawn again, at times with another result."""
    matcher, wanted = matcher_of(grammar), matcher_of(grammar)
    rng, filler = random.Random(seed), MaskFiller(512)
    for _ in range(10):
        (expected,) = filler.fill([wanted])
        wanted.mask = None  # computed again, from its state alone
        assert (filler.fill([matcher])[0] == expected).all()
        allowed = np.flatnonzero(np.unpackbits(expected, bitorder="little"))
        if not allowed.size:
            return
        token, other = (int(rng.choice(allowed)) for _ in range(2))
        match rng.choice(["push", "ahead", "other", "lost"]):
            case "ahead":
                matcher.push_ahead(token)
                filler.compute(matcher)
            case "other":
                matcher.push_ahead(other)
                filler.compute(matcher)
            case "lost":
                matcher.push_ahead(other)
                filler.compute(matcher)
                matcher.settle()
                assert (filler.fill([matcher])[0] == expected).all()
        matcher.push(token)
        wanted.push(token)
        assert matcher.complete == wanted.complete


def matcher_of(
    grammar: Grammar, compiler: Compiler = COMPILER, *, canonical: bool = False
) -> Matcher:
    request = Submit(rid="r", prompt="x", sampling=Sampling(seed=0), grammar=grammar)
    found = write_grammar(request, AnswerContext(), canonical=canonical)
    compilation = compiler.start(found)
    assert compilation.done.wait(10)
    return compiler.matcher(compilation)


@pytest.mark.parametrize("vocabulary", [512, 500, 479])
def test_a_mask_allows_no_token_without_a_logit(vocabulary: int) -> None:
    """A tokenizer may have more tokens than the model. A row that may draw only these would get
    logits of minus infinity alone, of which token 0 is drawn."""
    beyond = next(at for at in range(479, 512) if TEXT.vocabulary().tokens[at])
    text = re.escape(TEXT.vocabulary().tokens[beyond].decode())
    (mask,) = MaskFiller(vocabulary).fill([matcher_of(Grammar("regex", text))])
    bits = np.unpackbits(mask, bitorder="little")

    assert not bits[vocabulary:].any()
    assert bits[:vocabulary].any()


def test_a_text_that_is_forced_again_is_tokenized_once() -> None:
    """With the embedded model, tokenizing took half of the time of masks."""
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return TEXT.vocabulary().encode(text)

    vocabulary = replace(TEXT.vocabulary(), encode=encode, canonical=True)
    record = {"type": "object", "properties": {"name": {"enum": ["a"]}}, "required": ["name"]}
    schema = {"type": "array", "items": {**record, "additionalProperties": False}, "minItems": 9}
    matcher = matcher_of(
        Grammar("json_schema", json.dumps(schema)), Compiler(lambda: vocabulary), canonical=True
    )
    filler, chance = MaskFiller(512), random.Random(0)
    for _ in range(200):
        (mask,) = filler.fill([matcher])
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        matcher.push(int(chance.choice(allowed)))

    assert texts
    assert len(texts) == len(set(texts))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_grammars_are_compiled_at_a_lower_priority_than_rows() -> None:
    seen: list[int] = []

    def vocabulary() -> Vocabulary:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return TEXT.vocabulary()

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    matcher_of(Grammar("regex", "[a-c]{2}"), Compiler(vocabulary))

    assert seen == [min(19, own + NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


@settings(max_examples=15, deadline=None)
@given(grammar=GRAMMARS, vocabulary=st.sampled_from([512, 500]))
def test_the_first_mask_is_that_of_the_compilation(grammar: Grammar, vocabulary: int) -> None:
    """It takes up to 50 ms, which other rows would wait for, so it is computed only once."""
    known, new = matcher_of(grammar), matcher_of(grammar)
    new.first, filler = None, MaskFiller(vocabulary)
    known.grammar = None  # not used

    assert (filler.fill([known])[0] == filler.fill([new])[0]).all()
