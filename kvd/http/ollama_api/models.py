"""Models as Ollama's API describes them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from protocol.model_source import unknown_model

if TYPE_CHECKING:
    from protocol.types import DaemonStatus, ModelInfo, ModelStatus

_LATEST = ":latest"
"""Tag that Ollama's clients append to a name without one."""
_NEVER = "9999-12-31T00:00:00Z"


def known_name(name: str, status: DaemonStatus) -> str:
    """Return a model's name in kvd, without the tag that a client has appended."""
    names = {*(model.name for model in status.models), *status.unloaded}
    if name not in names and name.removesuffix(_LATEST) in names:
        return name.removesuffix(_LATEST)
    return name


def tags(status: DaemonStatus, started_at: int) -> dict[str, Any]:
    """Return all models that a request may name."""
    entries = {name: _entry(name, None, started_at) for name in status.unloaded}
    entries |= {model.name: _entry(model.name, model, started_at) for model in status.models}
    return {"models": [entries[name] for name in sorted(entries)]}


def running(status: DaemonStatus, started_at: int, now: float) -> dict[str, Any]:
    """Return the models that are loaded; ``now`` is in seconds since 1970."""
    return {
        "models": [
            _entry(model.name, model, started_at)
            | {
                "expires_at": _NEVER
                if model.expires_in_s is None
                else _time(now + model.expires_in_s),
                "size_vram": model.granted_bytes,
                "context_length": 0 if model.info is None else model.info.context_length,
            }
            for model in status.models
            if model.state == "ready"
        ]
    }


def shown(name: str, status: DaemonStatus, started_at: int) -> dict[str, Any]:
    """Return one model; raises `UnknownModel`."""
    found = next((model for model in status.models if model.name == name), None)
    if found is None and name not in status.unloaded:
        raise unknown_model(name, [model.name for model in status.models], status.unloaded)
    info = None if found is None else found.info
    return {
        "license": "",
        "modelfile": f"# {name} is served by kvd; it has no Modelfile",
        "parameters": "",
        "template": "",
        "details": _details(info),
        "model_info": {} if info is None else _model_info(info),
        "capabilities": _capabilities(info),
        "modified_at": _time(started_at),
    }


def _entry(name: str, model: ModelStatus | None, started_at: int) -> dict[str, Any]:
    source = name if model is None else model.source
    return {
        "name": name,
        "model": name,
        "modified_at": _time(started_at),
        "size": 0 if model is None else model.stats.memory.weights,
        "digest": hashlib.sha256(source.encode("utf-8", "replace")).hexdigest(),
        "details": _details(None if model is None else model.info),
    }


def _details(info: ModelInfo | None) -> dict[str, Any]:
    family = "" if info is None else info.architecture
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if info is None else _size(info.parameters),
        "quantization_level": "" if info is None else info.dtype,
    }


def _size(parameters: int) -> str:
    billions = parameters / 1e9
    return f"{billions:.1f}B" if billions >= 1 else f"{parameters / 1e6:.2f}M"


def _model_info(info: ModelInfo) -> dict[str, Any]:
    kind = info.architecture
    found: dict[str, Any] = {
        "general.architecture": kind,
        "general.parameter_count": info.parameters,
        f"{kind}.context_length": info.context_length,
        f"{kind}.block_count": info.layers,
        f"{kind}.vocab_size": info.vocab_size,
    }
    if info.embedding is not None:
        found[f"{kind}.embedding_length"] = info.embedding.dimensions
    return found


def _capabilities(info: ModelInfo | None) -> list[str]:
    found = ["completion"]
    if info is not None and info.embedding is not None:
        found.append("embedding")
    if info is not None and info.chat is not None:
        found += ["tools"] * bool(info.chat.tools) + ["thinking"] * bool(info.chat.reasoning)
    return found


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
