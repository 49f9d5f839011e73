"""Masks against brute force: every token is tried with a copy of the matcher."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from kvd.worker.grammar.answers import AnswerContext, write_grammar
from kvd.worker.grammar.compiler import NICENESS, Compiler
from kvd.worker.grammar.matcher import MaskFiller, Matcher
from kvd.worker.grammar.vocabulary import TokenTable, Vocabulary
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


STRINGS = st.one_of(
    st.integers(1, 40).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from([{"type": "string"}, {"enum": ["x" * 30, "y"]}, {"type": "integer"}]),
)
LONGER = st.one_of(
    STRINGS.map(lambda one: Grammar("json_schema", json.dumps({"type": "array", "items": one}))),
    STRINGS.map(lambda one: Grammar("json_schema", json.dumps({"additionalProperties": one}))),
    st.sampled_from([r"[a-z ]{3,9}\.", r'"[^"]{0,7}"|[^"]{9}', "(?s:.*)END"]).map(
        lambda text: Grammar("regex", text)
    ),
    st.just(Grammar("lark", 'start: line+\nline: ("+" | "-") /(.*)/ "\\n"')),
)


def long_tokens() -> Vocabulary:
    """Return a vocabulary with tokens of each length up to 40 characters."""
    rng = random.Random(0)
    texts = {bytes([one]): None for one in range(256)}
    for length in range(2, 41):
        for alphabet in ("abxy ", "é ü", 'a"\\,:\n[]{}'):
            chars = rng.choices(alphabet, k=8 * length)
            texts |= {"".join(chars[at::8]).encode(): None for at in range(8)}
    ends = frozenset({len(texts)})
    return Vocabulary([*texts, b"<end>"], ends, ends, lambda _: [], canonical=False)


LONG = long_tokens()
SLICED = Compiler(lambda: LONG)
WHOLE = LLTokenizer(cast(Any, TokenTable(LONG)), eos_token=[*LONG.eos_ids], slices=[])


@settings(max_examples=60, deadline=None)
@given(grammar=LONGER, seed=st.integers(0, 99))
def test_slices_change_no_mask(grammar: Grammar, seed: int) -> None:
    """Masks equal those of llguidance without slices, for tokens of up to 40 characters."""
    request = Submit(rid="r", prompt="x", sampling=Sampling(seed=0), grammar=grammar)
    whole = LLMatcher(WHOLE, write_grammar(request, AnswerContext(), canonical=False).text)
    sliced, rng = matcher_of(grammar, SLICED), random.Random(seed)
    filler = MaskFiller(len(LONG.tokens))
    for _ in range(12):
        wanted = np.frombuffer(whole.compute_bitmask(), np.uint8)
        (mask,) = filler.fill([sliced])
        assert (mask == wanted[: mask.size]).all()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if not allowed.size or (token := int(rng.choice(allowed))) in LONG.eos_ids:
            return
        sliced.push(token)
        assert whole.consume_token(token)


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
