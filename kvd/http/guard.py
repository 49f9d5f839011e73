"""Who may ask: API keys, and the two headers by which a browser gives itself away.

A page of any website can make its visitor's browser send requests to this machine. Such a request
says where it comes from (Origin), or names us by the website's own name that was made to point
here (Host, DNS rebinding). Programs send neither. Pure: headers in, a `Refusal` or nothing out.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvd.http import keys
from kvd.http.errors import forbidden, plain, unauthorized

if TYPE_CHECKING:
    from kvd.config.http import HttpSettings


@dataclass(frozen=True)
class Guard:
    """The rules of one configuration, for what comes by TCP."""

    settings: HttpSettings

    def check_host(self, host: str | None) -> None:
        """Refuse a name that is not ours; an address cannot be made to point elsewhere."""
        if not host:
            raise plain(400, "the Host header is missing")
        name = _name(host)
        if name is not None and (_is_address(name) or _is_local(name)):
            return
        if name not in {known.lower() for known in self.settings.hosts}:
            raise forbidden(
                f"this daemon is not called {host!r}; if it is, put the name into hosts of [http] "
                "in config.toml",
                "host_not_allowed",
            )

    def check_origin(self, origin: str | None, host: str | None) -> str | None:
        """Refuse pages of others; return the origin whose page may read the answer."""
        if origin is None or origin in {f"http://{host}", f"https://{host}"}:
            return None
        if "*" in self.settings.origins or origin in self.settings.origins:
            return origin
        raise forbidden(
            f"pages of {origin} may not use this daemon; origins of [http] in config.toml says "
            "which may",
            "origin_not_allowed",
        )

    def check_key(self, authorization: str | None) -> str | None:
        """Refuse a request without a key where there are keys; return the name of its key."""
        if not self.settings.keys:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise unauthorized("give an API key: the header Authorization: Bearer KEY")
        owner = keys.owner(key.strip(), self.settings.keys)
        if owner is None:
            raise unauthorized("this API key is not known here")
        return owner


def _name(host: str) -> str | None:
    """Return the name in a Host header, without port and final dot; None if it is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises where it is no number
    except ValueError:
        return None
    if parts.hostname is None or parts.username is not None or parts.path:
        return None
    return parts.hostname.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")
