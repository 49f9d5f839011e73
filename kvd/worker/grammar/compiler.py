"""Compiles grammars for one model's vocabulary in a few threads.

Clients choose the grammars. llguidance bounds what each may take (`_LIMITS`); its constructors
release Python's lock, so other rows keep decoding. The first mask is computed in the same thread:
it is the slowest one, and shows a grammar that cannot be followed before a request runs.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvd.worker.grammar.answers import AnswerGrammar
from kvd.worker.grammar.matcher import Mask, Matcher, shown
from kvd.worker.grammar.vocabulary import SLICES, TokenTable, Vocabulary
from kvd.worker.lean_imports import np
from protocol.errors import InvalidRequest, KvdError, Overloaded

COMPILE_SECONDS = 10.0
"""Seconds until a compilation is given up. The slowest one that ended took 1.7 s: an object of
2000 properties, on a busy machine."""
THREADS = 4
"""Grammars that are compiled at the same time."""
MAX_COMPILING = 64
"""Grammars of new requests that are compiled or wait for that."""
NICENESS = 5
"""By how much the priority of these threads is lower than that of the threads that compute rows.
Beside four compilations of an object of 2000 properties, on two busy processors, the 90th
percentile of a row's steps was 54 ms without it and 24 ms with it (13 ms without compilations)."""
CACHED = 64
"""Compiled grammars that are kept."""
CACHED_CHARS = 4 << 20
"""Characters of their texts together."""
CACHED_BYTES = 16 << 20
"""Bytes that they take together, as measured. The newest one may take more."""
COMPILE_BYTES = 64 << 20
"""Bytes that a compilation may need (measured within `_LIMITS`: 39 MiB)."""
STEP_BYTES = 48 << 20
"""Bytes that the masks of a step may need."""

# Measured need of a hundred tools, an enumeration of 3000 texts, 150 models of an OpenAPI document
# and an object of 2000 properties: fuel of 100,000 at first and 5,000 a step, 1,000 states, size
# 20,000. Calls with long tags, as in DeepSeek V4's form, take 70,000 in one step.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=120_000,
    step_max_items=20_000,
    max_lexer_states=8_192,
    max_grammar_size=50_000,
    precompute_large_lexemes=True,  # without it, nested repetitions took minutes for one mask
    verbose_errors=False,
)


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of the worker's process, in bytes."""

    room: Callable[[], int] = lambda: 1 << 62
    """Returns how much the process may still grow before it is ended."""
    held: Callable[[], int] = lambda: 0
    """Returns how much the process holds."""
    trim: Callable[[], object] = lambda: None
    """Returns freed memory to the system."""
    trim_malloc: Callable[[], object] = lambda: None
    """Returns the freed memory that malloc keeps; in any thread."""


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
    nbytes: int = 0
    """Growth of the process while it was compiled. Other growth at the same time counts as well, so
    that it is dropped early rather than late."""
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
        memory: ProcessMemory | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._memory = memory or ProcessMemory()
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._known: OrderedDict[str, Compilation] = OrderedDict()
        self._compiling: set[str] = set()
        self._queue: deque[tuple[Compilation, AnswerGrammar]] = deque()
        self._queue_lock = threading.Lock()
        """Protects ``_queue``, ``_threads`` and ``_active``."""
        self._threads = 0
        self._freed = 0
        """Bytes of dropped grammars since memory was returned to the system."""
        self._active = 0
        """Compilations that need `COMPILE_BYTES` each."""
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
        if compilation is None or self._may_be_retried(compilation):
            self._trim()
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
                self._start_thread()
        self._known.move_to_end(text)
        return compilation

    def _start_thread(self) -> None:
        """Start another thread; without any, refuse what is queued."""
        try:
            # `Thread.start` waits until the thread runs: up to 70 ms on busy processors.
            _thread.start_new_thread(self._work, ())
        except RuntimeError:  # the limit of threads, or of memory
            with self._queue_lock:
                self._threads -= 1
                refused = [] if self._threads else list(self._queue)
                if refused:
                    self._queue.clear()
            for compilation, _ in refused:
                compilation.error = Overloaded(
                    "no thread can be started to compile the grammar; retry later",
                    retry_after_s=1.0,
                )
                compilation.done.set()
                self._compiling.discard(compilation.text)

    def _may_be_retried(self, compilation: Compilation) -> bool:
        is_known = compilation.text not in self._compiling
        return is_known and isinstance(compilation.error, Overloaded)

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
        found.nbytes = compilation.nbytes
        return found

    @property
    def kept_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept, as measured."""
        return sum(one.nbytes for one in self._known.values())

    def shrink(self) -> None:
        """Drop all compiled grammars, and return their memory to the system.

        Matchers keep theirs.
        """
        self._drop(0, 0, 0)
        self._memory.trim()

    def relieve(self, matchers: Sequence[Matcher | None]) -> None:
        """Keep `STEP_BYTES` of room for the masks of a step.

        Grammars grow while they are followed. If memory is short, the compiled ones are dropped. If
        there are none, the matcher with the largest grammar is given up.
        """
        followed = [one for one in matchers if one is not None]
        if not followed or self._memory.room() >= STEP_BYTES:
            return
        if any(text not in self._compiling for text in self._known):
            self.shrink()
        else:
            max(followed, key=lambda one: one.nbytes).give_up()

    def _trim(self) -> None:
        """Make room for a new grammar."""
        if self._memory.room() < COMPILE_BYTES * (1 + self._active):
            self.shrink()
            return
        dropped = self._drop(CACHED - 1, CACHED_CHARS, CACHED_BYTES)
        self._freed += sum(one.nbytes for one in dropped)
        if self._freed > CACHED_BYTES // 2:
            self._freed = 0
            try:  # freeing them took up to 3.6 ms, and trimming 2.9 ms
                _thread.start_new_thread(self._free, (dropped,))
            except RuntimeError:  # the limit of threads, or of memory
                self._free(dropped)

    def _free(self, dropped: list[Compilation]) -> None:
        dropped.clear()
        self._memory.trim_malloc()

    def _drop(self, count: int, chars: int, nbytes: int) -> list[Compilation]:
        """Drop the oldest grammars until the rest is within these bounds; return them."""
        count = len(self._known) - count
        chars = sum(len(text) for text in self._known) - chars
        nbytes = sum(one.nbytes for one in self._known.values()) - nbytes
        dropped: list[Compilation] = []
        for text, one in list(self._known.items()):
            if count <= 0 and chars <= 0 and nbytes <= 0:
                break
            if text not in self._compiling:
                del self._known[text]
                count, chars, nbytes = count - 1, chars - len(text), nbytes - one.nbytes
                dropped.append(one)
        return dropped

    def _work(self) -> None:
        _lower_priority()
        while True:
            with self._queue_lock:
                if not self._queue:
                    self._threads -= 1
                    return
                compilation, grammar = self._queue.popleft()
            compilation.started, compilation.begun = self._clock(), True
            self._compile(compilation, grammar)

    def _compile(self, compilation: Compilation, answer: AnswerGrammar) -> None:
        with self._queue_lock:
            self._active += 1
            short = self._memory.room() < COMPILE_BYTES * self._active
        before = self._memory.held()
        grammar: Any = None
        error: KvdError | None = _short()
        if not short:
            grammar, error = self._compile_now(compilation, answer)
        compilation.nbytes = min(max(0, self._memory.held() - before), COMPILE_BYTES)
        # Later requests use it even if the first one waited in vain, as on a busy machine.
        compilation.grammar, compilation.error = grammar, error
        with self._queue_lock:
            self._active -= 1
        compilation.done.set()
        self._compiling.discard(compilation.text)

    def _compile_now(
        self, compilation: Compilation, answer: AnswerGrammar
    ) -> tuple[Any, KvdError | None]:
        grammar, compilation.mask, error = self._compiled(compilation.text)
        if error is not None:
            compilation.culprit = self._culprit(compilation, answer)
        return grammar, error

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
                ends = sorted(vocabulary.eos_ids)
                self._tokenizer = LLTokenizer(table, eos_token=ends, slices=SLICES)
            return self._tokenizer


def _lower_priority() -> None:
    """Give the calling thread `NICENESS`, on Linux: elsewhere this would be the whole process."""
    if sys.platform == "linux":
        with suppress(OSError):  # a container may forbid it
            thread = threading.get_native_id()
            lowered = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, lowered)


def _short() -> Overloaded:
    return Overloaded(
        "memory is too short to compile the grammar; retry later, or raise the budget",
        retry_after_s=1.0,
    )


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
