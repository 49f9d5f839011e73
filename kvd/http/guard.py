"""Access control for TCP: API keys, and the headers ``Host`` and ``Origin``.

A page of any website can make its visitor's browser send requests to this machine. Their ``Origin``
then names the page's origin. If the website's own name resolves to this machine (DNS rebinding),
their ``Host`` has that name.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvd.http import keys
from kvd.http.errors import forbidden, plain, unauthorized

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

    from kvd.config.http import HttpSettings


def single(headers: CIMultiDictProxy[str], name: str) -> str | None:
    """Return a header's value; refuse several, of which another reader may take another one."""
    values = headers.getall(name, ())
    if len(values) > 1:
        raise plain(400, f"the request has {len(values)} {name} headers; send one")
    return values[0] if values else None


def is_own_origin(origin: str, host: str | None) -> bool:
    """Return whether a page's origin is the server that it asks."""
    return origin in {f"http://{host}", f"https://{host}"}


@dataclass(frozen=True)
class Guard:
    """The rules of one configuration."""

    settings: HttpSettings

    def check_host(self, host: str | None) -> None:
        """Refuse unknown host names; addresses pass, since DNS rebinding needs a name."""
        if not host:
            raise plain(400, "the Host header is missing")
        name = _name(host)
        if name is not None and (
            _is_address(name) or name == "localhost" or name.endswith(".localhost")
        ):
            return
        if name not in {known.lower() for known in self.settings.hosts}:
            raise forbidden(
                f"the host name {host!r} is not allowed; to allow it, add it to hosts of [http] in "
                "config.toml",
                "host_not_allowed",
            )

    def check_origin(self, origin: str | None, host: str | None) -> str | None:
        """Refuse foreign pages; return the origin if it is foreign and allowed."""
        if origin is None or is_own_origin(origin, host):
            return None
        if "*" in self.settings.origins or origin in self.settings.origins:
            return origin
        raise forbidden(
            f"pages of {origin} may not use this daemon; to allow them, add the origin to origins "
            "of [http] in config.toml",
            "origin_not_allowed",
        )

    def check_key(self, authorization: str | None, api_key: str | None = None) -> str | None:
        """Refuse a request without a valid key if keys are configured; return the key's name.

        ``api_key`` is the header ``x-api-key`` of Anthropic's clients. Of two keys, one must be
        valid: clients may send a key of another service as well.
        """
        if not self.settings.keys:
            return None
        scheme, _, bearer = (authorization or "").partition(" ")
        given = [bearer if scheme.lower() == "bearer" else "", api_key or ""]
        given = [key for key in map(str.strip, given) if key]
        if not given:
            raise unauthorized(
                "an API key is required: send the header Authorization: Bearer KEY, or x-api-key"
            )
        for key in given:
            if (owner := keys.owner(key, self.settings.keys)) is not None:
                return owner
        raise unauthorized("this API key is unknown")


def _name(host: str) -> str | None:
    """Return the name in a Host header without port and final dot; None if it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises if it is not a number
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
