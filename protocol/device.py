"""The budget of one memory, a part of `protocol.types`."""

from __future__ import annotations

import msgspec


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of one GPU, or of the host's memory."""

    budget_bytes: int
    granted_bytes: int
