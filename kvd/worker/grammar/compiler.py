"""Compiles grammars for one model's vocabulary in a few threads.

Clients choose the grammars. llguidance bounds what each may take (`_LIMITS`); its constructors
release Python's lock, so other rows keep decoding. The first mask is computed in the same thread:
it is the slowest one, and shows a grammar that cannot be followed before a request runs.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvd.worker.grammar.answers import AnswerGrammar
from kvd.worker.grammar.matcher import Mask, Matcher, shown
from kvd.worker.grammar.vocabulary import TokenTable, Vocabulary
from protocol.errors import InvalidRequest, KvdError, Overloaded

COMPILE_SECONDS = 10.0
"""Seconds until a compilation is given up. The slowest one that ended took 1.7 s: an object of
2000 properties, on a busy machine."""
THREADS = 4
"""Grammars that are compiled at the same time."""
MAX_COMPILING = 64
"""Grammars of new requests that are compiled or wait for that."""
CACHED = 64
"""Compiled grammars that are kept."""
CACHED_CHARS = 4 << 20
"""Characters of their texts together."""

_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=True,  # without it, nested repetitions took minutes for one mask
    verbose_errors=False,
)


@dataclass(eq=False)
class Compilation:
    """A grammar that is being compiled, or was."""

    text: str
    started: float
    """When it began, or when it was queued."""
    begun: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    grammar: Any = None
    """`LLMatcher` at the grammar's beginning; None until done, and after an error."""
    mask: Mask | None = None
    """The mask of the first token: the slowest one, 25 ms for an object of 2000 properties."""
    error: KvdError | None = None
    culprit: int | None = None
    """Which of the grammar's ``parts`` has the error; None: another part of it, or none alone."""

    def failure(self, fields: Sequence[str]) -> KvdError | None:
        """Return the error, which names the field that it is in; ``fields``: `AnswerGrammar`'s."""
        if self.error is None or self.culprit is None:
            return self.error
        field = fields[self.culprit]
        return InvalidRequest(f"{field}: {self.error.message}", field=field)


class Compiler:
    """The grammars of one engine. ``vocabulary`` is called at the first one, or by `preparing`."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._known: OrderedDict[str, Compilation] = OrderedDict()
        self._compiling: set[str] = set()
        self._queue: deque[tuple[Compilation, AnswerGrammar]] = deque()
        self._queue_lock = threading.Lock()
        """Protects ``_queue`` and ``_threads``."""
        self._threads = 0
        self._eos_ids: frozenset[int] = frozenset()

    @contextmanager
    def preparing(self, wanted: bool = True) -> Iterator[None]:
        """Build llguidance's tokenizer while the block runs; wait for it at the end.

        It takes 0.8 s of Python's lock for 150,000 tokens, which rows would wait for. An error is
        left to the first grammar.
        """
        thread = threading.Thread(target=self._prepare, name="tokenizer", daemon=True)
        if wanted:
            thread.start()
        yield
        if wanted:
            thread.join()

    def _prepare(self) -> None:
        with suppress(BaseException):  # panics of Rust derive from it
            self._get_tokenizer()

    def start(self, grammar: AnswerGrammar, *, accepted: bool = False) -> Compilation:
        """Return the compilation of a grammar; does not wait for it.

        Raises `Overloaded` if too many are being compiled, unless the request was ``accepted`` by
        an earlier worker.
        """
        text = grammar.text
        compilation = self._known.get(text)
        if compilation is None:
            if len(self._compiling) >= MAX_COMPILING and not accepted:
                raise Overloaded(
                    f"{MAX_COMPILING} grammars are being compiled; retry later", retry_after_s=1.0
                )
            compilation = Compilation(text, self._clock())
            self._known[text] = compilation
            self._compiling.add(text)
            with self._queue_lock:
                self._queue.append((compilation, grammar))
                is_new = self._threads < THREADS
                self._threads += is_new
            if is_new:
                threading.Thread(target=self._work, name="grammar", daemon=True).start()
            self._trim()
        self._known.move_to_end(text)
        return compilation

    def is_over(self, compilation: Compilation) -> bool:
        """Return whether a compilation ended or took too long; the latter sets its error."""
        if not compilation.done.is_set():
            if self._clock() - compilation.started < COMPILE_SECONDS:
                return False
            if compilation.begun:
                compilation.error = InvalidRequest(
                    f"the grammar was not compiled within {COMPILE_SECONDS:g} s; simplify it",
                    field="grammar",
                )
            else:
                compilation.error = Overloaded(
                    f"the grammar waited {COMPILE_SECONDS:g} s for others to be compiled; retry"
                    " later",
                    retry_after_s=1.0,
                )
            compilation.done.set()
        return True

    def matcher(self, compilation: Compilation, *, optional: bool = False) -> Matcher:
        """Return a matcher at the grammar's beginning; raises the compilation's error.

        ``optional``: see `Matcher`.
        """
        if compilation.error is not None:
            raise compilation.error
        size = int(self._tokenizer.vocab_size)
        grammar = compilation.grammar.deep_copy()
        found = Matcher(grammar, self._eos_ids, size, optional=optional)
        found.first = compilation.mask
        return found

    def _trim(self) -> None:
        chars = sum(len(text) for text in self._known)
        for text in list(self._known)[:-1]:
            if len(self._known) <= CACHED and chars <= CACHED_CHARS:
                return
            if text not in self._compiling:
                del self._known[text]
                chars -= len(text)

    def _work(self) -> None:
        while True:
            with self._queue_lock:
                if not self._queue:
                    self._threads -= 1
                    return
                compilation, grammar = self._queue.popleft()
            compilation.started, compilation.begun = self._clock(), True
            self._compile(compilation, grammar)

    def _compile(self, compilation: Compilation, answer: AnswerGrammar) -> None:
        grammar, compilation.mask, error = self._compiled(compilation.text)
        if error is not None:
            compilation.culprit = self._culprit(compilation, answer)
        # Later requests use it even if the first one waited in vain, as on a busy machine.
        compilation.grammar, compilation.error = grammar, error
        compilation.done.set()
        self._compiling.discard(compilation.text)

    def _culprit(self, compilation: Compilation, answer: AnswerGrammar) -> int | None:
        """Return `Compilation.culprit`; None too if the time for the compilation is over."""
        end = compilation.started + COMPILE_SECONDS
        with suppress(KvdError):  # a part alone may be nested too deep
            for number, part in enumerate(answer.parts()):
                if self._clock() >= end:
                    break
                if self._compiled(part)[2] is not None:
                    return number
        return None

    def _compiled(self, text: str) -> tuple[Any, Mask | None, KvdError | None]:
        try:
            grammar = LLMatcher(self._get_tokenizer(), text, log_level=0, limits=_LIMITS)
            return grammar, _first_mask(grammar), None
        except KvdError as failure:
            return None, None, failure
        except BaseException as failure:  # noqa: BLE001 - panics of Rust derive from it
            return None, None, _refused(str(failure))

    def _get_tokenizer(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                vocabulary = self._vocabulary()
                if not vocabulary.eos_ids:
                    raise InvalidRequest(
                        "the model has no end token, so a grammar cannot end its answer; use"
                        " another model",
                        field="grammar",
                    )
                self._eos_ids = vocabulary.eos_ids
                table: Any = TokenTable(vocabulary)
                self._tokenizer = LLTokenizer(table, eos_token=sorted(vocabulary.eos_ids))
            return self._tokenizer


def _first_mask(grammar: Any) -> Mask:
    """Return the mask of the first token; raises `InvalidRequest` if that shows an error."""
    if grammar.is_error():
        raise _refused(grammar.get_error())
    first = grammar.deep_copy()
    mask = np.frombuffer(first.compute_bitmask(), np.uint8)
    if first.is_error() or not mask.any():
        raise _refused(first.get_error() or "no text matches it")
    return mask


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the grammar cannot be used: {shown(reason)}; correct or simplify it", field="grammar"
    )
