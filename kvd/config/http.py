"""The table ``[http]`` of `config.toml`.

Imported by whoever reads the configuration, so it needs no HTTP library.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvd.host.units import parse_bytes

DEFAULT_PORT = 11711
MOST_BODY_BYTES = 24 * 1024 * 1024
"""What a worker takes in one message is 32 MiB; a prompt grows a little on its way there."""

KeyHash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
"""What `kvctl key new` prints for the configuration; the key itself is nowhere."""
KeyName = Annotated[str, Meta(min_length=1, max_length=64)]
Origin = Annotated[str, Meta(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]*)\Z")]
"""Scheme, host and port as browsers say them, without a path; ``*`` is any."""


class HttpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and for whom the daemon answers HTTP."""

    enabled: bool = True
    """``false``: neither TCP nor ``http.sock``, and nothing of it is loaded."""
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address or name to listen on; one that others can reach needs ``keys``."""
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Absent: 11711, or no TCP if another program has that one; 0: any that is free."""
    tcp: bool = True
    """``false``: only ``http.sock``."""
    keys: dict[KeyName, KeyHash] = {}
    """Name to hash of each API key, as `kvctl key new` prints it; with one, TCP needs one."""
    hosts: list[str] = []
    """Names that clients may call this machine by, beside ``localhost`` and plain addresses."""
    origins: list[Origin] = []
    """Web pages that may use it (CORS), such as ``https://chat.example``; ``*``: all."""
    body_limit: str | Annotated[int, Meta(ge=1024, le=MOST_BODY_BYTES)] = "8MiB"
    """The most that a request may have."""
    idle_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 75.0
    """A connection that sends no whole request for so long is closed."""

    @property
    def body_bytes(self) -> int:
        """That limit as a number; raises ValueError where it is none."""
        limit = self.body_limit
        size = parse_bytes(limit) if isinstance(limit, str) else limit
        if size > MOST_BODY_BYTES:
            raise ValueError(f"must be at most {MOST_BODY_BYTES} bytes")
        return size


def laid_over(settings: HttpSettings, said: str | None) -> HttpSettings:
    """Return the settings with what the command line says: ``off``, ``PORT`` or ``HOST:PORT``.

    Raises ValueError for what is none of them.
    """
    if said is None:
        return settings
    if said == "off":
        return replace(settings, enabled=False)
    host, _, port = said.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{said!r} must be PORT, HOST:PORT or off")
    place = host.removeprefix("[").removesuffix("]") or settings.host
    return replace(settings, enabled=True, tcp=True, host=place, port=int(port))


OF_THE_COMMAND_LINE = frozenset({"enabled", "tcp", "host", "port"})
"""What that decides."""
