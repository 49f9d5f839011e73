"""The grammar of a request's answer."""

from __future__ import annotations

from kvd.worker.grammar.source import Source, inner_grammar
from protocol.worker import Submit


def grammar_of(request: Submit, *, canonical: bool) -> str | None:
    """Return the grammar that an answer must match, in llguidance's form; None: any answer.

    ``canonical``: see `kvd.worker.grammar.vocabulary.Vocabulary`.
    """
    if request.grammar is None:
        return None
    source = Source({})
    return source.text(source.nest(inner_grammar(request.grammar)), canonical=canonical)
