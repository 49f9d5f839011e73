"""The grammar that a request gets: the strongest of its grammars that can be compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress

from kvd.worker.grammar.answers import AnswerGrammar
from kvd.worker.grammar.compiler import Compilation, Compiler
from kvd.worker.grammar.matcher import Matcher
from protocol.errors import InternalError, InvalidRequest, KvdError, Overloaded

_log = logging.getLogger("kvd.worker")


class GrammarChoice:
    """Compiles the grammars of one request in turn, until one is usable.

    ``write`` returns the first one, and is called by the executor ``writer``: for a schema of 1 MiB
    it takes 10 ms. ``accepted``: whether an earlier worker accepted the request, so that it is
    never refused because many grammars are being compiled.
    """

    def __init__(
        self,
        compiler: Compiler,
        writer: Executor,
        write: Callable[[], AnswerGrammar],
        *,
        accepted: bool,
    ) -> None:
        self.grammar: AnswerGrammar | None = None
        """The grammar that is used if it can be compiled; None: the request runs without one."""
        self.notes: list[str] = []
        """Constraints that are not enforced, with the reason."""
        self._compiler = compiler
        self._accepted = accepted
        self._compilation: Compilation | None = None
        self._error: KvdError | None = None
        self._writing: Future[AnswerGrammar] | None = writer.submit(write)

    def is_over(self) -> bool:
        """Return whether it is known which grammar the request gets."""
        if self._writing is not None:
            if not self._writing.done():
                return False
            writing, self._writing = self._writing, None
            self._begin(writing)
        while self._compilation is not None and self._compiler.is_over(self._compilation):
            fields = () if self.grammar is None else self.grammar.fields
            error = self._compilation.failure(fields)
            if error is None or self.grammar is None:
                return True
            self._compilation = None
            self._weaken(self.grammar, error)
        return self._compilation is None

    def wait(self, seconds: float) -> None:
        """Wait for what is under way: writing the grammar, or its compilation."""
        if self._writing is not None:
            with suppress(TimeoutError):
                self._writing.exception(seconds)
        elif self._compilation is not None:
            self._compilation.done.wait(seconds)

    def matchers(self, count: int) -> list[Matcher | None]:
        """Return a matcher for each choice; raises `KvdError` if no grammar can be used."""
        if self._error is not None:
            raise self._error
        if self._compilation is None or self.grammar is None:
            return [None] * count
        compilation, optional = self._compilation, self.grammar.optional
        return [self._compiler.matcher(compilation, optional=optional) for _ in range(count)]

    def _begin(self, writing: Future[AnswerGrammar]) -> None:
        """Compile the grammar that was written."""
        try:
            grammar = writing.result()
        except KvdError as error:
            self._error = error
        except BaseException:  # noqa: BLE001 - panics of Rust derive from it
            _log.exception("a grammar could not be written")
            self._error = InternalError("the worker failed to write the grammar; see its log")
        else:
            self.notes += grammar.notes
            self._start(grammar)

    def _start(self, grammar: AnswerGrammar) -> None:
        self.grammar = grammar
        try:
            self._compilation = self._compiler.start(grammar, accepted=self._accepted)
        except Overloaded as error:
            self._weaken(grammar, error)

    def _weaken(self, grammar: AnswerGrammar, error: KvdError) -> None:
        """Go on with a weaker grammar than one that cannot be compiled, or without any."""
        if grammar.weaker is not None and isinstance(error, InvalidRequest):
            self.notes.append(f"grammars of custom tools are not enforced: {error.message}")
            self._start(grammar.weaker)
        elif grammar.optional:
            self.grammar = None
            self.notes.append(f"calls are not kept valid by a grammar: {error.message}")
        else:
            self._error = error
