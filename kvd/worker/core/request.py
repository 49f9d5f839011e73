"""A request in the engine: its prompt, its completions, and where their rows are.

Only `Batch` and `PreemptedRows` assign these fields, `delivery` for what was reported, and
`progress` and `forced` for known tokens. All other modules read them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.worker.core.replay import SentText
from kvd.worker.grammar.matcher import Matcher
from kvd.worker.prefix.cache import TrackedPrompt
from kvd.worker.serving.runner import Row
from kvd.worker.text.choices import Choices
from kvd.worker.text.places import Conversation
from kvd.worker.text.stream import TextStream
from protocol.messages import FinishReason
from protocol.worker import Submit

Key = tuple[str, int]
"""A completion: request id and choice."""


@dataclass(eq=False)
class Completion:
    """One of a request's answers."""

    key: Key
    stream: TextStream
    first_input: int
    """Last token of the prompt: the input of the first decode step."""
    row: Row | None = None
    """Its row, once the prompt is prefilled."""
    snapshot: Any = None
    """Snapshot of ``row``, while the request is preempted."""
    launched: int = 0
    """Decode steps launched; each produces one token."""
    known: int = 0
    """Tokens drawn before a replay or recomputation: their steps run again without a draw."""
    dropped: bool = False
    """Whether the token that the step in flight draws is replaced by one that the stream forces."""
    matcher: Matcher | None = None
    """Its state in the request's grammar, after ``tokens``; None without a grammar."""
    sent_text: SentText = field(default_factory=SentText)
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """Tokens that were drawn and read, including one that ended the completion."""
    trusted: bool = False
    """Whether the newest logits were finite and varied. Then its keys and values are finite."""
    ended: bool = False
    released: bool = False
    """Whether its row is freed: a step in flight may outlive the completion's end."""

    @property
    def complete(self) -> bool:
        """Whether its grammar allows no further token."""
        return self.matcher is not None and self.matcher.complete

    @property
    def is_lent(self) -> bool:
        """Whether a thread advances its matcher."""
        return self.matcher is not None and self.matcher.lent

    @property
    def reason(self) -> FinishReason:
        """Why it ends, once it has stopped or has as many tokens as it may have."""
        return "stop" if self.stream.stopped or self.complete else "length"

    def drop_grammar(self, reason: str) -> None:
        """Continue without the grammar; ``reason``: for the event log."""
        self.matcher = None
        self.stream.note(reason)

    def forget_draw(self) -> None:
        """Return to the state before the token that a failed step has drawn."""
        self.dropped = False
        if self.matcher is not None:
            self.matcher.settle()

    @property
    def next_input(self) -> int:
        """The next step's input token, or 0 if the step in flight still computes it."""
        if not self.launched:
            return self.first_input
        return self.tokens[self.launched - 1] if self.launched <= len(self.tokens) else 0


@dataclass(frozen=True)
class SwappedRows:
    """The file with a preempted request's rows."""

    path: Path
    nbytes: int
    owners: tuple[Key | None, ...]
    """The completion of each row, in the file's order; None: the row of an unfinished prompt."""


@dataclass(eq=False)
class Request:
    """A request that the engine accepted."""

    submit: Submit
    """The daemon's command. `Batch.add` removes its prompt and progress: 40 bytes per token."""
    prompt: array[int]
    max_new: int
    completions: list[Completion]
    """Completions that are not released."""
    choices: Choices
    tracked: TrackedPrompt
    row: Row | None = None
    """The row that prefill fills; None once the completions have rows of their own."""
    snapshot: Any = None
    """Snapshot of ``row``, while the request is preempted."""
    key: None = None
    """Distinguishes the request from its completions in `SwappedRows.owners`."""
    kept_pages: int = 0
    """Pages of the budget that its snapshots take while it is preempted."""
    begun: bool = False
    """Whether its completions have rows, or had them when it was preempted."""
    started: bool = False
    """Whether it ever had a row."""
    swapped: SwappedRows | None = None
    mixed_levels: bool = False
    """Whether it was stepped down with tokens in its rows: recomputed rows would differ."""
    prompt_level: int | None = None
    """The level at which its prompt was prefilled, if it was stepped down since."""
    level: int = 0
    """Its precision level; a step-down may still be requantizing its pages."""
    conversation: Conversation | None = None
    """What its prompt was rendered from, until its prefill begins; None: it is not known."""
    prompt_reported: int = 0
    """Prompt tokens whose logprobs were reported, also by an earlier worker."""
    resumed_at: int | None = None
    """Tokens of its longest completion when it was last resumed, by this worker after preemption or
    after an earlier worker."""

    @property
    def rid(self) -> str:
        return self.submit.rid

    @property
    def live(self) -> list[Completion]:
        return [completion for completion in self.completions if not completion.ended]

    @property
    def generated(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def longest(self) -> int:
        return max((len(completion.tokens) for completion in self.completions), default=0)

    @property
    def owners(self) -> list[Request | Completion]:
        """The request and its completions: each may own a row or a snapshot."""
        return [self, *self.completions]

    @property
    def kept(self) -> list[Any]:
        """Its rows, and their snapshots while it is preempted."""
        return [kept for owner in self.owners for kept in (owner.row, owner.snapshot) if kept]

    @property
    def preempted_owners(self) -> list[Request | Completion]:
        return [owner for owner in self.owners if owner.snapshot is not None]
