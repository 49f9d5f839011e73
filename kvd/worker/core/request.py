"""A request while it is in the engine: its prompt, its completions, and where each of them is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.worker.core.replay import unsaid
from kvd.worker.prefix.cache import TrackedPrompt
from kvd.worker.sampling.sampler import RowSettings
from kvd.worker.serving.runner import Row
from kvd.worker.text.choices import Choices
from kvd.worker.text.text import TextStream
from protocol.worker import Submit

Key = tuple[str, int]
"""A completion: request and choice."""


@dataclass(eq=False)
class Completion:
    """One of a request's answers."""

    key: Key
    stream: TextStream
    row: Row | None = None
    """Its place in the cache, from when its prompt is through."""
    snapshot: Any = None
    """What was there when the request was parked."""
    launched: int = 0
    """Tokens whose steps have been launched."""
    known: int = 0
    """Tokens that were sent before: their steps are run again, and nothing is drawn in them."""
    said_bytes: int = 0
    """Of the text to come, what was sent before."""
    tokens: list[int] = field(default_factory=list)
    """Drawn and read, a token that ended it too."""
    trusted: bool = False
    """Whether the newest logits were sound, and so all that they attended to."""
    ended: bool = False
    released: bool = False

    def unsaid(self, text: str) -> str:
        """Return what of the next text was not sent before."""
        if not self.said_bytes:
            return text
        new = unsaid(text, self.said_bytes)
        self.said_bytes = max(0, self.said_bytes - len(text.encode()))
        return new

    def input(self, before: int) -> int:
        """Return what the next step is given, if it has been read; ``before`` it all."""
        if not self.launched:
            return before
        return self.tokens[self.launched - 1] if self.launched <= len(self.tokens) else 0


@dataclass(frozen=True)
class Saved:
    """The file of a parked request's rows."""

    path: Path
    nbytes: int
    holders: tuple[Key | None, ...]
    """Whose they are, in the file's order; None: the request's own, amidst its prompt."""


@dataclass(eq=False)
class Request:
    """A request that was accepted."""

    submit: Submit
    prompt: list[int]
    max_new: int
    completions: list[Completion]
    """Those that hold something here; they go one by one."""
    over: Choices
    tracked: TrackedPrompt
    """Its prompt, as far as it may be shared."""
    row: Row | None = None
    """Where its prompt is read; empty again once its completions have rows of their own."""
    snapshot: Any = None
    """What was there when the request was parked."""
    kept_pages: int = 0
    """How much that is, in the budget's pages."""
    distrusted: bool = False
    """Whether its prompt has given bad logits."""
    begun: bool = False
    """Whether its completions have had rows."""
    saved: Saved | None = None
    """Where its rows are, if they are on disk."""
    mixed: bool = False
    """Whether it was stepped down on its way: read again, it would not be the same."""
    level: int = 0
    """Of the ladder, that it runs on; what it has may be on its way there."""
    prompt_reported: int = 0
    """Tokens of the prompt whose logprobs were told."""
    resumed_at: int | None = None
    """How long its longest completion was when it went on after it had been parked."""

    @property
    def rid(self) -> str:
        """The daemon's name for it."""
        return self.submit.rid

    @property
    def salt(self) -> str:
        """What keeps its prompt apart from others' prompts."""
        return self.tracked.salt

    @property
    def live(self) -> list[Completion]:
        """Completions that are not over."""
        return [one for one in self.completions if not one.ended]

    @property
    def made(self) -> int:
        """Tokens so far, of all completions that are still here."""
        return sum(len(one.tokens) for one in self.completions)

    @property
    def longest(self) -> int:
        """Tokens of the longest completion that is still here."""
        return max((len(one.tokens) for one in self.completions), default=0)

    @property
    def holders(self) -> list[Request | Completion]:
        """All that may hold something of it in the cache."""
        return [self, *self.completions]

    @property
    def snapshots(self) -> list[Any]:
        """What is frozen of it."""
        return [one.snapshot for one in self.holders if one.snapshot is not None]

    def start_over(self) -> None:
        """Note that nothing of it is in the cache: its prompt is read again, its tokens are fed."""
        self.begun = False
        for completion in self.completions:
            completion.launched = 0
            completion.known = len(completion.tokens)

    def settings(self, completion: Completion) -> RowSettings:
        """Return how a completion is drawn."""
        return RowSettings.of(self.submit, completion.stream.ends, completion.key[1])
