"""What the worker's loop asks of an engine: the seam between processes and tensors.

Two implementations: `kvd.worker.core.engine` (the real one) and `kvd.worker.fake.engine` (speed,
load time and faults from a string, no tensors). All calls come from the loop's one thread.

An engine knows nothing of sockets, of the daemon or of clients: it turns commands into reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from protocol.worker import (
    Grant,
    LoadModel,
    Phase,
    Reclaim,
    Report,
    StartLevel,
    Submit,
    Tokenize,
    Tokenized,
)

if TYPE_CHECKING:
    from protocol.types import ModelInfo, WorkerStats

ReportProgress = Callable[[str, float], None]
"""``(stage, fraction)``: fraction is 0 to 1 of the whole load. Also a sign of life."""

AskGrant = Callable[[int, str], Grant]
"""``(total_bytes, reason)``: blocks until the daemon answers; only during `Engine.load`.

Later requests for memory are `MemoryRequested` reports of `Engine.step`; their ``seq`` goes on
after that of the last `Grant` that this returned.
"""


OnPhase = Callable[[Phase], None]
"""Called before each phase of a step begins, so that who watches knows what takes long; cheap."""


def ignore_phase(_: Phase) -> None:
    """Tell nobody."""


class Engine(Protocol):
    """One model that runs rows: ``load`` once, then ``submit`` and ``step`` as often as needed."""

    def load(self, command: LoadModel, progress: ReportProgress, ask_grant: AskGrant) -> ModelInfo:
        """Make the model ready, or raise a `KvdError` that says why it never will be."""
        ...

    def submit(self, request: Submit) -> int:
        """Queue a request and return its prompt's tokens.

        A `KvdError` fails this request alone; nothing of it stays in the engine then.
        """
        ...

    def tokenize(self, request: Tokenize) -> Tokenized:
        """Return the tokens of a text, as `submit` would read it; a `KvdError` says why not."""
        ...

    def cancel(self, rid: str) -> None:
        """End a row at the next step, which reports it ``cancelled``; unknown ids are over."""
        ...

    def granted(self, grant: Grant) -> None:
        """Take the answer to a `MemoryRequested`."""
        ...

    def reclaim(self, command: Reclaim) -> None:
        """Give memory back by one means, beside what steps do; a `Reclaimed` ends it."""
        ...

    def start_level(self, command: StartLevel) -> None:
        """Let new rows start at a level of the ladder."""
        ...

    def step(self) -> list[Report]:
        """Run one step; return its tokens, ends, failures and requests for memory.

        Each submitted row ends with exactly one `RowFinished` or `RowFailed`.
        """
        ...

    def watch(self, on_phase: OnPhase) -> None:
        """Call this before each phase of a step from now on."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now.

        False while all that is left waits for a grant: the loop then sleeps until it comes.
        """
        ...

    @property
    def reads_prompts(self) -> bool:
        """Whether steps read prompts now, and may take long for it; who waits for room has none."""
        ...

    @property
    def next_deadline(self) -> float | None:
        """When there will be work even if no command comes, in monotonic seconds; None: never."""
        ...

    def stats(self) -> WorkerStats:
        """Return the counters; the loop adds the rate and the process footprint."""
        ...

    def close(self) -> None:
        """Let go of what the process's exit does not."""
        ...
