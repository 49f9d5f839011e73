"""One request as the scheduler sees it: its prompt's length, its queue key and its pages."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from kvd.worker.cache.scheme import full_pages


class QueueKey(NamedTuple):
    """Sort key of a request among all others; the smallest is first."""

    start: int
    """Tokens of work submitted before this request, minus what its priority is worth."""
    arrival: int
    """Sequence number, so that no two keys are equal."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt positions ``start`` to ``end`` (exclusive) of one request, to be prefilled."""

    rid: str
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(eq=False, slots=True)
class ScheduledRequest:
    """A request in any state.

    An admitted request has ``choices`` rows and reserves `pages`: enough for ``reserved_new``
    tokens of each choice (`growth`). Any other request has no rows. If it was preempted and stays
    in memory, it holds ``kept_pages``.
    """

    rid: str
    prompt_len: int
    max_new: int
    queue_key: QueueKey
    priority: int
    deadline: float | None
    """Absolute time in seconds, on the caller's clock."""
    choices: int
    """Choices that have not finished."""
    promised_new: int = 0
    """Tokens of each choice that must fit into the budget: the request is refused otherwise."""
    reserved_new: int = 0
    """Tokens of each choice for which pages are reserved."""
    generated: int = 0
    """Most decode steps of a choice so far, each of which generates one token."""
    first_choice_pages: int = 0
    """Pages that one choice fills with ``reserved_new`` tokens, the prompt's pages included."""
    further_choice_pages: int = 0
    level: int = 0
    """Precision level at which the request runs or will start, and at which pages are counted."""
    prefilled: int = 0
    """Prompt tokens that are in the KV cache."""
    was_admitted: bool = False
    """Whether the request was ever admitted, so that the engine has state to restore."""
    suspended: bool = False
    reads_prompt: bool = False
    """Whether its first ``prefilled`` tokens are being read from the prefix store. Until then it is
    suspended."""
    kept_pages: int = 0
    path: tuple[Hashable, ...] = ()
    """One name per whole chunk of the prompt (see `shared_prompts`). Empty: nothing is shared."""
    prompt_started: bool = False
    """Whether the prompt was looked up in the prefix cache, or one of its chunks ran."""

    @property
    def prefill_end(self) -> int:
        """Where prefill ends. The prompt's last token is the first decode input."""
        return self.prompt_len - 1

    @property
    def remaining(self) -> int:
        return self.prefill_end - self.prefilled

    @property
    def ahead(self) -> int:
        """Tokens that each choice can still generate within the reservation."""
        return self.reserved_new - self.generated

    @property
    def least_new(self) -> int:
        """Tokens of each choice that must fit into the budget for the request to go on."""
        return max(self.promised_new, min(self.generated + 1, self.max_new))

    @property
    def stalled(self) -> bool:
        """Whether a decoding request needs a larger reservation for its next token."""
        return self.ahead <= 0 and self.generated < self.max_new and not self.remaining

    @property
    def pages(self) -> int:
        """Pages reserved while admitted: what its rows fill at most within ``reserved_new`` tokens.

        During a step down they are still counted at the level that the request comes from.
        """
        return self.first_choice_pages + (self.choices - 1) * self.further_choice_pages

    @property
    def missing_pages(self) -> int:
        """Pages to reserve at admission, beyond those that the request keeps."""
        return self.pages - self.kept_pages


@dataclass(frozen=True)
class ReservationSizes:
    """Pages that a request fills in the worst case, counted in one unit at all precision levels.

    ``pages_for(length, level)``: pages that a row fills at most until it has ``length`` tokens.
    ``own_pages(start, end, level)``: pages that each further choice adds between these lengths.
    Without ``own_pages``, choices share nothing. ``levels``: number of precision levels.
    """

    pages_for: Callable[[int, int], int] = lambda length, _level: full_pages(length)
    own_pages: Callable[[int, int, int], int] | None = None
    levels: int = 1

    @property
    def lowest_level(self) -> int:
        """The last level: the model's quality floor."""
        return self.levels - 1

    def of(self, prompt_len: int, max_new: int, level: int) -> tuple[int, int]:
        """Return the pages of a request's first choice, and those that each further one adds."""
        end = prompt_len + max_new
        first = self.pages_for(end, level)
        if self.own_pages is None:
            return first, first
        return first, self.own_pages(prompt_len - 1, end, level)
