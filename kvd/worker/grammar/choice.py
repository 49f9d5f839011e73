"""The grammar that a request gets: the strongest of its grammars that can be compiled."""

from __future__ import annotations

from kvd.worker.grammar.answers import AnswerGrammar
from kvd.worker.grammar.compiler import Compilation, Compiler
from kvd.worker.grammar.matcher import Matcher
from protocol.errors import InvalidRequest, KvdError, Overloaded


class GrammarChoice:
    """Compiles the grammars of one request in turn, until one is usable.

    ``accepted``: whether an earlier worker accepted the request, so that it is never refused
    because many grammars are being compiled.
    """

    def __init__(self, compiler: Compiler, grammar: AnswerGrammar, *, accepted: bool) -> None:
        """Begin to compile; raises `Overloaded` if the request cannot run without a grammar."""
        self.grammar: AnswerGrammar | None = grammar
        """The grammar that is used if it can be compiled; None: the request runs without one."""
        self.notes = list(grammar.notes)
        """Constraints that are not enforced, with the reason."""
        self._compiler = compiler
        self._accepted = accepted
        self._compilation: Compilation | None = None
        self._error: KvdError | None = None
        self._start(grammar)
        if isinstance(self._error, Overloaded):
            raise self._error

    def is_over(self) -> bool:
        """Return whether it is known which grammar the request gets."""
        while self._compilation is not None and self._compiler.is_over(self._compilation):
            fields = () if self.grammar is None else self.grammar.fields
            error = self._compilation.failure(fields)
            if error is None or self.grammar is None:
                return True
            self._compilation = None
            self._weaken(self.grammar, error)
        return self._compilation is None

    def wait(self, seconds: float) -> None:
        """Wait for the compilation that is under way."""
        if self._compilation is not None:
            self._compilation.done.wait(seconds)

    def matchers(self, count: int) -> list[Matcher | None]:
        """Return a matcher for each choice; raises `KvdError` if no grammar can be used."""
        if self._error is not None:
            raise self._error
        if self._compilation is None or self.grammar is None:
            return [None] * count
        compilation, optional = self._compilation, self.grammar.optional
        return [self._compiler.matcher(compilation, optional=optional) for _ in range(count)]

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
