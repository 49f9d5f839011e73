"""Which models there are to name, and whether the daemon is ready for requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from kvd.http.responses import Model, ModelExtension, ModelList

if TYPE_CHECKING:
    from protocol.types import DaemonStatus, ModelStatus

_COMING = frozenset({"stopped", "spawning", "loading", "backoff"})


def listed(status: DaemonStatus, created: int) -> ModelList:
    """Return all models that a request may name; those that sleep are loaded by it."""
    loaded = [_model(one, created) for one in status.models]
    unloaded = [Model(name, created, ModelExtension("asleep")) for name in status.unloaded]
    return ModelList(sorted([*loaded, *unloaded], key=lambda model: model.id))


def _model(status: ModelStatus, created: int) -> Model:
    info = status.info
    return Model(
        status.name,
        created,
        ModelExtension(
            state=status.state,
            context_length=UNSET if info is None else info.context_length,
            kv=UNSET if info is None else info.kv_scheme,
            source=status.source,
        ),
    )


def readiness(status: DaemonStatus, *, starting: bool) -> tuple[bool, dict[str, Any]]:
    """Return whether requests should come here, and why not; in numbers, since no key is asked for.

    Not while it drains, and not while what is loaded at start is on its way and nothing else could
    answer. A model that comes back after a crash, or sleeps, does not count: requests wait for it.
    """
    states: list[str] = [model.state for model in status.models]
    unloaded, ready = len(status.unloaded), states.count("ready")
    coming = sum(state in _COMING for state in states)
    if status.state == "draining":
        said = "draining"
    elif ready or unloaded:
        said = "ready"
    elif starting or coming:
        said = "loading"
    else:
        said = "failed" if states else "ready"
    models = {
        "ready": ready,
        "asleep": unloaded,
        "loading": coming,
        "failed": states.count("failed"),
    }
    return said == "ready", {"status": said, "models": models}
