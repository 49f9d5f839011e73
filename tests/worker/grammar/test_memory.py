"""Memory of grammars: no grammar may end a worker."""

from __future__ import annotations

import itertools
import json
import random
import threading

import pytest

from kvd.worker.grammar.answers import AnswerContext, AnswerGrammar, write_grammar
from kvd.worker.grammar.compiler import (
    CACHED_BYTES,
    COMPILE_BYTES,
    STEP_BYTES,
    Compiler,
    ProcessMemory,
)
from kvd.worker.grammar.matcher import MaskFiller, Matcher
from kvd.worker.grammar.schema_limits import MAX_INTERSECTED, MAX_TEXT_CHARS, fault_of
from kvd.worker.grammar.source import inner_grammar
from kvd.worker.grammar.tool_texts import ToolTexts
from kvd.worker.process import memory
from kvd.worker.process.memory_limit import MemoryLimit
from kvd.worker.text.text import Text
from protocol.errors import InvalidRequest, Overloaded
from protocol.tools import Grammar, Tool
from protocol.types import Sampling
from protocol.worker import Submit
from tests.worker.core.driver import Driver
from tests.worker.core.prompts import periodic_prompt
from tests.worker.text.tokenizers_zoo import byte_level, wrap

MIB = 1 << 20
TEXT = Text(wrap(byte_level()), vocab_size=512, context_length=512)
PATTERNS = [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(20, 60)]
NAMED = {f"p{number}": one for number, one in enumerate(PATTERNS)}


def answer_grammar(grammar: Grammar) -> AnswerGrammar:
    request = Submit(rid="r", prompt="x", sampling=Sampling(), max_tokens=8, grammar=grammar)
    return write_grammar(request, AnswerContext(), canonical=True)


def compiled(compiler: Compiler, grammar: Grammar) -> Matcher:
    compilation = compiler.start(answer_grammar(grammar))
    assert compilation.done.wait(30)
    return compiler.matcher(compilation)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99_991},
        {"type": "number", "multipleOf": 9.9991},
        {"allOf": [{"multipleOf": 9_973}, {"multipleOf": 9_967}]},
        {"allOf": PATTERNS},
        {"items": {"allOf": [{"allOf": [one]} for one in PATTERNS]}},
        {"allOf": [{"properties": {"a": one}} for one in PATTERNS]},
        {"allOf": [{"$ref": f"#/$defs/{name}"} for name in NAMED], "$defs": NAMED},
        {"allOf": [{"items": {"$ref": f"#/$defs/{name}"}} for name in NAMED], "$defs": NAMED},
        {"type": "string", "pattern": "x" * (MAX_TEXT_CHARS + 1)},
        {"enum": ["x" * (MAX_TEXT_CHARS + 1)]},
    ],
)
def test_schemas_that_llguidance_does_not_bound_are_refused(schema: object) -> None:
    text = json.dumps(schema)
    with pytest.raises(InvalidRequest, match="cannot be used"):
        inner_grammar(Grammar("json_schema", text))
    with pytest.raises(InvalidRequest, match=r"cannot be used|takes at most"):
        inner_grammar(Grammar("lark", f"start: %json {text}"))


def test_terminals_that_combine_many_expressions_are_refused() -> None:
    bodies = [f"/(?s:.*)a.{{{number}}}b/" for number in range(20, 60)]
    with pytest.raises(InvalidRequest, match="39 expressions with &"):
        inner_grammar(Grammar("lark", f"start: T\nT: {' & '.join(bodies)}"))


def test_ordinary_schemas_are_within_the_bounds() -> None:
    """References may form cycles and inherit; a literal ``&`` combines nothing."""
    inherited = {
        f"m{number}": {
            "allOf": [
                {"$ref": "#/$defs/base"},
                {"properties": {"next": {"$ref": f"#/$defs/m{(number + 1) % 300}"}}},
            ]
        }
        for number in range(300)
    }
    base = {"properties": {f"k{n}": PATTERNS[n] for n in range(40)}}
    assert fault_of({"$defs": {"base": base, **inherited}, "$ref": "#/$defs/m0"}) is None
    assert fault_of({"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 500}}}) is None
    assert fault_of({"allOf": PATTERNS[:MAX_INTERSECTED]}) is None
    assert fault_of({"allOf": [{"$ref": "#"}]}) is None
    inner_grammar(Grammar("lark", 'start: "&" /&/ ' + '"a && b" ' * 40))


def test_a_text_that_is_forced_takes_no_memory_of_its_length() -> None:
    """llguidance holds 350 bytes for each character that a matcher forces."""
    compiler = Compiler(TEXT.vocabulary)
    before = memory.private()
    matcher = compiled(compiler, Grammar("regex", "((x{100}){100}){100}"))
    matcher.first = None  # computed again

    assert MaskFiller(512).fill([matcher]).any()
    assert memory.private() - before < 16 * MIB


def test_a_text_of_usual_length_is_forced() -> None:
    schema = {"const": "a" * 2000, "pattern": "^[a-z]{0,62}$"}
    assert "no_forcing" not in answer_grammar(Grammar("json_schema", json.dumps(schema))).text


def test_a_hundred_tools_and_large_documents_can_be_compiled() -> None:
    chance = random.Random(0)
    kinds = [
        {"type": "string"},
        {"type": "string", "format": "date-time"},
        {"type": "integer", "minimum": 0, "maximum": 10_000},
        {"type": "array", "items": {"type": "string"}, "maxItems": 20},
        {"enum": ["a", "bb", "ccc"]},
        {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,62}$"},
    ]
    models = {
        f"m{number}": {
            "type": "object",
            "properties": {
                **{f"f{chance.randrange(80)}": chance.choice(kinds) for _ in range(6)},
                "next": {"$ref": f"#/$defs/m{chance.randrange(150)}"},
            },
        }
        for number in range(150)
    }
    schemas = [
        {"$defs": models, "anyOf": [{"$ref": f"#/$defs/m{number}"} for number in range(100)]},
        {"enum": [f"{chance.randrange(10**6)}-{number}" for number in range(3000)]},
        {"type": "object", "properties": {f"k{number}": {} for number in range(2000)}},
    ]
    compiler = Compiler(TEXT.vocabulary)
    for schema in schemas:
        matcher = compiled(compiler, Grammar("json_schema", json.dumps(schema)))
        assert MaskFiller(512).fill([matcher]).any()


def test_the_expression_of_a_custom_tool_has_a_limit() -> None:
    tool = Tool("long", grammar=Grammar("regex", "x" * (MAX_TEXT_CHARS + 1)))
    texts = ToolTexts()

    assert texts.regex(tool) is None
    assert "65537 characters" in texts.notes[0]


class Process:
    """The memory of a process in which each compilation takes 6 MiB, as a test sets it."""

    def __init__(self) -> None:
        self.room = 1 << 40
        self.held = 0
        self.trims = 0
        self.trimming: list[int] = []
        """Threads that returned the memory of dropped grammars."""
        self.compiler = Compiler(
            TEXT.vocabulary,
            memory=ProcessMemory(lambda: self.room, self._grow, self._trim, self._trim_malloc),
        )

    def _grow(self) -> int:
        self.held += 3 * MIB
        return 2 * self.held

    def _trim(self) -> None:
        self.trims += 1

    def _trim_malloc(self) -> None:
        self.trimming.append(threading.get_ident())

    def cached(self) -> list[int]:
        return [one.nbytes for one in self.compiler._known.values()]


def regex(number: int) -> Grammar:
    return Grammar("regex", f"[a-z]{{{number + 1}}}")


def test_kept_grammars_are_bounded_by_their_bytes() -> None:
    process = Process()
    for number in range(20):
        compiled(process.compiler, regex(number))

    assert 6 * MIB * (len(process.cached()) - 1) <= CACHED_BYTES
    assert set(process.cached()) == {6 * MIB}
    while len(process.trimming) < 5:  # a few us after the grammars were dropped
        threading.Event().wait(0.001)
    assert threading.get_ident() not in process.trimming


def test_a_grammar_that_needs_more_memory_than_is_left_is_refused_until_there_is_more() -> None:
    process = Process()
    compiled(process.compiler, regex(0))
    process.room = COMPILE_BYTES - 1
    with pytest.raises(Overloaded, match="memory is too short to compile"):
        compiled(process.compiler, regex(1))
    assert process.trims
    assert all(one.error is not None for one in process.compiler._known.values())

    process.room = COMPILE_BYTES
    compiled(process.compiler, regex(1))


def test_if_memory_is_short_in_a_step_the_cache_is_dropped_before_a_matcher() -> None:
    process = Process()
    small, large = (compiled(process.compiler, regex(number)) for number in range(2))
    large.nbytes = 2 * small.nbytes
    matchers = [small, None, large]
    process.compiler.relieve(matchers)
    assert len(process.cached()) == 2

    process.room = STEP_BYTES - 1
    process.compiler.relieve(matchers)
    assert not process.cached()
    assert process.trims == 1
    assert not large.failed

    process.compiler.relieve(matchers)
    assert (small.failed, large.failed) == (False, True)
    masks = MaskFiller(512).fill(matchers)
    assert [bool(mask.any()) for mask in masks] == [True, True, False]
    assert isinstance(large.failure(), Overloaded)


@pytest.mark.mlx
def test_a_row_without_memory_for_its_grammar_ends_and_others_go_on(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.submit("free", "To open a file,", max_tokens=20, ignore_eos=True)
    demo.submit("bound", "To open a file,", max_tokens=20, grammar=Grammar("regex", "[a-z]{18}"))
    demo.run(until=lambda: len(demo.outcomes["bound"].tokens) > 2)
    compiler = demo.engine._submissions._compiler
    monkeypatch.setattr(compiler, "_memory", ProcessMemory(room=lambda: 0))
    demo.run()

    assert demo.outcomes["bound"].error.code == "overloaded"
    assert len(demo.outcomes["free"].tokens) == 20


def test_the_room_of_a_process_is_what_its_limit_leaves() -> None:
    limit = MemoryLimit(private=lambda: 100, end=lambda _status: None, enabled=True)
    assert limit.room() > 1 << 60  # no limit applies
    limit._started = True
    assert limit.room() == limit.nbytes - 100


@pytest.mark.mlx
def test_kept_grammars_are_charged_and_a_reclaim_of_spare_memory_drops_them(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, account = demo.engine._submissions._compiler, demo.engine._memory
    compiler.shrink()
    growth = itertools.count(0, 8 * MIB)
    monkeypatch.setattr(compiler, "_memory", ProcessMemory(held=lambda: next(growth)))
    before = account.held()
    demo.submit("bound", "To open a file,", max_tokens=4, grammar=Grammar("regex", "[a-z]{9}"))
    demo.run()
    budget = demo.engine._admission.budget

    assert (account.held().cached - before.cached) * budget.page_bytes >= 8 * MIB
    assert account.spare_bytes() >= 0
    assert account.reclaimable().spare >= account.spare_bytes() + 8 * MIB
    wanted = account.spare_bytes() + 8 * MIB
    assert demo.reclaim("spare", wanted).freed_bytes >= wanted
    assert not compiler.kept_bytes


@pytest.mark.mlx
def test_a_request_that_finds_no_memory_gets_that_of_kept_grammars(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, account = demo.engine._submissions._compiler, demo.engine._memory
    compiler.shrink()
    growth = itertools.count(0, 32 * MIB)
    monkeypatch.setattr(compiler, "_memory", ProcessMemory(held=lambda: next(growth)))
    demo.submit("bound", "To open a file,", max_tokens=4, grammar=Grammar("regex", "[a-z]{9}"))
    demo.run()
    monkeypatch.setattr(demo, "others", demo.budget)  # the daemon grants nothing more
    budget = demo.engine._admission.budget
    demo.engine._runner.cache.shrink()  # else the idle engine's free pages suffice
    while account.spare_bytes():
        demo.total -= account.spare_bytes()
        budget.granted_bytes = demo.total
    demo.submit("free", periodic_prompt(1500, 1), max_tokens=20, ignore_eos=True)
    demo.run()

    assert len(demo.outcomes["free"].tokens) == 20
    assert not compiler.kept_bytes
