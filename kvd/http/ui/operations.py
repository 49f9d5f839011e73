"""The page's operations, as JSON: ``{"op": "unload", "model": "demo"}``.

They cannot load a model that the daemon does not know, and cannot change the configuration: any
process of this machine can use TCP if no keys are configured.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from kvd.http.ui.control import Control
from protocol.fields import Name, PositiveSeconds, Priority


class _Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op"):
    model: Name


class LoadKnown(_Operation, frozen=True, tag="load"):
    """Load a known model; answered when it is ready."""


class Unload(_Operation, frozen=True, tag="unload"):
    """Finish the model's requests, then end its worker."""

    force: bool = False
    """Whether running requests end at once."""


class SetPolicy(_Operation, frozen=True, tag="policy"):
    """Change a model's policy until the daemon ends. Absent fields stay."""

    pinned: bool | UnsetType = UNSET
    priority: Priority | UnsetType = UNSET
    idle_ttl_s: PositiveSeconds | UnsetType | None = UNSET
    """``null`` removes the limit."""


Operation = LoadKnown | Unload | SetPolicy


async def perform(control: Control, operation: Operation) -> dict[str, Any]:
    """Perform an operation and return its result; raises its `KvdError`."""
    name = operation.model
    match operation:
        case LoadKnown():
            loaded = await control.load_known(name)
            return {"model": name, "granted_bytes": loaded.granted_bytes}
        case Unload(force=force):
            return {"model": name, "freed_bytes": await control.unload(name, force=force)}
        case SetPolicy():
            fields = {key: getattr(operation, key) for key in ("pinned", "priority", "idle_ttl_s")}
            changed = {key: value for key, value in fields.items() if value is not UNSET}
            await control.set_policy(name, changed)
            return {"model": name} | changed
