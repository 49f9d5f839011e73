"""The status of one GPU, a part of `protocol.types`."""

from __future__ import annotations

import msgspec


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of one GPU."""

    budget_bytes: int
    granted_bytes: int
