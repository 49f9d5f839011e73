"""The table ``[http]`` of `config.toml`. Needs no HTTP library."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvd.host.units import parse_bytes
from protocol.fields import PositiveSeconds

DEFAULT_PORT = 11711
MAX_BODY_BYTES = 24 * 1024 * 1024
"""Less than the 32 MiB limit of a message to a worker, because encoding adds a few bytes."""

KeyHash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
"""The hash that `kvctl key new` prints; the key itself is not stored."""
KeyName = Annotated[str, Meta(min_length=1, max_length=64)]
Origin = Annotated[str, Meta(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]*)\Z")]
"""Scheme, host and port as browsers send them, without a path; ``*`` allows any."""


class HttpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the HTTP server listens, and who may use it."""

    enabled: bool = True
    """``false`` disables TCP and ``http.sock``, and does not load the HTTP server."""
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address or name to listen on. Addresses that other machines can reach require ``keys``."""
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Default: 11711, or no TCP if another program uses it. 0 takes any free port."""
    tcp: bool = True
    """``false`` listens only on ``http.sock``."""
    keys: dict[KeyName, KeyHash] = {}
    """Hashes of the API keys by name, as `kvctl key new` prints them. If any is set, TCP requires a
    key."""
    hosts: list[str] = []
    """Allowed names of this machine in the ``Host`` header, besides ``localhost`` and addresses."""
    origins: list[Origin] = []
    """Web pages that may use the API (CORS), such as ``https://chat.example``; ``*`` allows all."""
    ui: bool = True
    """``false`` turns off the web page at ``/`` and its operations."""
    body_limit: str | Annotated[int, Meta(ge=1024, le=MAX_BODY_BYTES)] = "8MiB"
    """Maximum size of a request body."""
    idle_timeout_s: PositiveSeconds = 75.0
    """Seconds without a complete request after which a connection is closed."""

    @property
    def body_bytes(self) -> int:
        """The body limit as a number; raises ValueError if it is invalid."""
        size = parse_bytes(self.body_limit)
        if size > MAX_BODY_BYTES:
            raise ValueError(f"must be at most {MAX_BODY_BYTES} bytes")
        return size


def with_command_line(
    settings: HttpSettings,
    host: str | None,
    port: int | None,
    *,
    default_port: int | None = None,
    off: bool = False,
) -> HttpSettings:
    """Return the settings overridden by ``--host``, ``--port`` and ``--no-http``.

    ``default_port``: the port of KVD_PORT. A variable may be meant for another start, so it only
    replaces the port, while ``--host`` and ``--port`` also enable HTTP.
    """
    if off:
        return replace(settings, enabled=False)
    if default_port is not None:
        settings = replace(settings, port=default_port)
    if host is None and port is None:
        return settings
    host = (host or settings.host).removeprefix("[").removesuffix("]")
    port = settings.port if port is None else port
    return replace(settings, enabled=True, tcp=True, host=host, port=port)
