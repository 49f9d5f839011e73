"""The bodies of ``/v1/models`` and ``/readyz``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from kvd.http.responses import Model, ModelExtension, ModelList
from kvd.http.responses_api.codex import catalogue

if TYPE_CHECKING:
    from protocol.types import DaemonStatus, ModelStatus

_LOADING = frozenset({"stopped", "spawning", "loading", "backoff"})


def listed(status: DaemonStatus, created: int) -> ModelList:
    """Return all models that a request may name, including unloaded ones."""
    loaded = [_model(model, created) for model in status.models]
    unloaded = [Model(name, created, ModelExtension("unloaded")) for name in status.unloaded]
    models = sorted([*loaded, *unloaded], key=lambda model: model.id)
    return ModelList(models, catalogue(status))


def _model(status: ModelStatus, created: int) -> Model:
    info = status.info
    context_length = UNSET if info is None else info.context_length
    extension = ModelExtension(
        state=status.state,
        context_length=context_length,
        kv=UNSET if info is None else info.kv_scheme,
        source=status.source,
        chat=UNSET if info is None else info.chat,
    )
    return Model(
        status.name,
        created,
        extension,
        context_length=context_length,
        max_model_len=context_length,
    )


def readiness(status: DaemonStatus, *, starting: bool) -> tuple[bool, dict[str, Any]]:
    """Return whether the daemon is ready for requests, and the body of ``/readyz``.

    A single ready or unloaded model is enough, because requests for the others wait. The body
    contains no names, since it needs no API key.
    """
    states: list[str] = [model.state for model in status.models]
    unloaded, ready = len(status.unloaded), states.count("ready")
    loading = sum(state in _LOADING for state in states)
    if status.state == "draining":
        state = "draining"
    elif ready or unloaded:
        state = "ready"
    elif starting or loading:
        state = "loading"
    else:
        state = "failed" if states else "ready"
    failed = states.count("failed")
    models = {"ready": ready, "unloaded": unloaded, "loading": loading, "failed": failed}
    return state == "ready", {"status": state, "models": models}
