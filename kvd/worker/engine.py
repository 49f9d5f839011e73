"""The interface between the worker's loop and its engine.

`kvd.worker.core.engine.MLXEngine` and `kvd.worker.fake.engine.FakeEngine` implement it. The fake
engine takes its speed, load time and faults from the model's name. The loop calls all methods from
one thread.
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
    SegmentCommand,
    StartLevel,
    Submit,
    Tokenize,
    Tokenized,
)

if TYPE_CHECKING:
    from protocol.types import ModelInfo, WorkerStats

ReportProgress = Callable[[str, float], None]
"""``(stage, fraction)``: fraction is 0 to 1 of the whole load.

The watchdog ends a load that does not call this for too long.
"""

AskGrant = Callable[[int, str], Grant]
"""``(total_bytes, reason)``: blocks until the daemon answers; only during `Engine.load`.

Later memory requests are `MemoryRequested` reports of `Engine.step`. Their ``seq`` continues from
the ``seq`` of the last `Grant` returned here.
"""

OnPhase = Callable[[Phase], None]
"""Called before each phase of a step, so that the watchdog knows what takes long; must be cheap."""


OnReports = Callable[[list[Report]], None]
"""Called in the middle of a step with reports that should not wait for its end."""


def ignore_phase(_: Phase) -> None:
    """Do nothing: the default `OnPhase`."""


class Engine(Protocol):
    """The engine of one model: call `load` once, then `submit` and `step`."""

    def load(self, command: LoadModel, progress: ReportProgress, ask_grant: AskGrant) -> ModelInfo:
        """Load the model; raise a `KvdError` if it cannot be served."""

    def submit(self, request: Submit) -> int | None:
        """Queue a request and return the number of its prompt tokens.

        None: they are not known yet, and the engine reports `RowAccepted` or `RowFailed` later. A
        `KvdError` fails only this request, and the engine then keeps no state for it.
        """

    def tokenize(self, request: Tokenize) -> Tokenized:
        """Return the tokens that `submit` would make of a text; raises `KvdError`."""

    def cancel(self, rid: str) -> None:
        """End a request; `take_reports` returns its end, ``cancelled``. Ignores unknown ids."""

    def granted(self, grant: Grant) -> None:
        """Process the answer to a `MemoryRequested`."""

    def reclaim(self, command: Reclaim) -> None:
        """Return memory by one reclaim method during the next steps, then report `Reclaimed`."""

    def start_level(self, command: StartLevel) -> None:
        """Set the precision level at which new rows start."""

    def segment_command(self, command: SegmentCommand) -> None:
        """Process a change of the prefix store, or the answer to a `SegmentOffered`."""

    def drain(self, seconds: float) -> None:
        """Write prefixes for at most so many seconds; the rows have ended. May be repeated."""

    @property
    def keeps_worker(self) -> bool:
        """Whether a drained worker without rows should stay, because prefixes are being written."""

    def step(self) -> list[Report]:
        """Run one step; return its tokens, ends, failures and memory requests.

        Each submitted request ends with exactly one `RowFinished` or `RowFailed`.
        """

    def take_reports(self) -> list[Report]:
        """Return the reports that need no step, such as the end of a cancelled request.

        The next step would return them as well, but may have to wait for a time slice.
        """

    def watch(self, on_phase: OnPhase, on_reports: OnReports | None = None) -> None:
        """Call ``on_phase`` before each phase of a step from now on.

        ``on_reports`` may get reports before the step returns; None: `step` returns all of them.
        """

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now.

        False while all requests wait for a grant: the loop then sleeps until it arrives.
        """

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no request, no unsent report, and no memory to transfer.

        A step can then only return memory, grow pools, probe layers, or write to the prefix store.
        After a request, the loop delays such a step, because the next request may arrive soon.
        """

    @property
    def reads_prompts(self) -> bool:
        """Whether steps prefill now, and so may take long; False if requests wait for memory."""

    @property
    def next_deadline(self) -> float | None:
        """Monotonic seconds at which a step has work even without a command; None: never."""

    def stats(self) -> WorkerStats:
        """Return the counters; the loop adds the token rate and the process footprint."""

    def close(self) -> None:
        """Release what the end of the process does not release."""
