"""The text of one completion, as it is generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvd.worker.answer.call_ids import call_id
from kvd.worker.answer.parts import AnswerReader, Begin
from kvd.worker.text.detokenizer import Detokenizer
from kvd.worker.text.stops import StopFilter
from protocol.parts import PartStart


@dataclass(frozen=True)
class AnswerSplit:
    """How the text of a completion is split into parts."""

    reader: AnswerReader
    rid: str = ""
    choice: int = 0
    literals: Mapping[int, str] = field(default_factory=dict)
    """Texts of markers and special tokens, by id."""
    max_reasoning: int | None = None
    """Tokens of reasoning after which ``end_reasoning`` is forced; None: no limit. A character of
    several tokens is completed first."""
    end_reasoning: Sequence[int] = ()
    """Tokens that end the reasoning."""


class TextStream:
    """The text of one completion.

    Call `push` for each sampled token. Once `stopped`, the completion is over. If it ends for
    another reason, `finish` returns the rest. The first ``min_tokens`` tokens cannot end it, and
    their text is not part of a stop string (as in vLLM). Stop strings apply to text for the reader,
    not to reasoning and calls.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Iterable[str] = (),
        ends: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        split: AnswerSplit | None = None,
    ) -> None:
        """``split``: absent for answers that have no parts."""
        self.ends = ends
        """Tokens that end the completion; their text is not sent."""
        self.ended = False
        self.reasoning_tokens = 0
        """Tokens of reasoning, with its markers."""
        self.forced: list[int] = []
        """The next tokens of the completion, which must be pushed instead of drawn ones."""
        self._detokenizer = detokenizer
        self._stops = list(stops)
        self._filter = StopFilter(self._stops)
        self._free = min_tokens
        self._split = split
        self._parts: list[PartStart] = []
        self._calls = 0
        self._inside = 0
        """Tokens of reasoning without its markers."""
        self._limited = False
        """Whether the end of the reasoning was forced."""
        self._bytes = 0

    @property
    def stopped(self) -> bool:
        return self.ended or self._filter.stopped

    @property
    def may_force(self) -> bool:
        """Whether there can be tokens in `forced`."""
        return self._split is not None and self._split.max_reasoning is not None

    @property
    def stop_text(self) -> str:
        """The stop string that ended the completion; empty if something else did."""
        return self._filter.found

    def push(self, token: int) -> str:
        """Append a token and return the text that may be sent now."""
        free = self._free > 0
        if free:
            self._free -= 1
        elif token in self.ends:
            self.ended = True
            return self.finish()
        text = self._detokenizer.push(token)
        if self._split is None:
            return text if free else self._filter.push(text)
        literal, reader = self._split.literals.get(token, ""), self._split.reader
        if literal:
            text = text.rpartition(literal)[0] if literal in text else text
        was_reasoning = reader.reasoning
        reader.push(token, text, literal)
        self.reasoning_tokens += was_reasoning or reader.reasoning
        self._limit_reasoning(self._split, token, inside=was_reasoning and reader.reasoning)
        return self._collect(reader, free=free)

    def finish(self, *, ended: bool = False) -> str:
        """Return the text that was held back; text after a stop string is never returned.

        ``ended``: the answer is whole although no token of the model ended it.
        """
        text = self._detokenizer.finish()
        if self._split is None:
            text = self._filter.push(text)
        else:
            reader = self._split.reader
            reader.push(-1, text, "")
            reader.finish(ended=self.ended or ended)
            text = self._collect(reader)
        rest = self._filter.finish()
        self._bytes += len(rest.encode())
        return text + rest

    def take_parts(self) -> list[PartStart]:
        """Return the parts that begin in the text that was returned since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def note(self, reason: str) -> None:
        """Add a note on the calls of the answer."""
        if self._split is not None:
            self._split.reader.parts.note(reason)

    def take_notes(self) -> list[str]:
        """Return the notes since the last time, such as why a text is no call."""
        if self._split is None:
            return []
        notes = self._split.reader.parts.notes
        found, notes[:] = list(notes), []
        return found

    def _limit_reasoning(self, split: AnswerSplit, token: int, *, inside: bool) -> None:
        if self.forced:
            if token == self.forced[0]:
                del self.forced[0]
            return
        self._inside += inside
        if self._limited or split.max_reasoning is None or self._inside < split.max_reasoning:
            return
        # Grammars accept no marker within a character.
        if inside and self._detokenizer.whole:
            self._limited = True
            self.forced = list(split.end_reasoning)

    def _collect(self, reader: AnswerReader, *, free: bool = False) -> str:
        pieces: list[str] = []
        for found in reader.parts.take():
            if isinstance(found, str):
                piece = found if free else self._filter.push(found)
            elif self._filter.stopped:
                break
            else:
                piece = self._filter.finish()
                self._filter = StopFilter(self._stops if found.kind == "text" else ())
            self._bytes += len(piece.encode())
            pieces.append(piece)
            if isinstance(found, Begin):
                self._begin(found)
        return "".join(pieces)

    def _begin(self, found: Begin) -> None:
        call = ""
        if found.kind == "call" and self._split is not None:
            call = call_id(self._split.rid, self._split.choice, self._calls)
            self._calls += 1
        self._parts.append(PartStart(self._bytes, found.kind, found.name, call))
