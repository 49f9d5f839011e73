"""The page's files, as they are in the package: no build step, no other server.

A browser keeps a copy and asks whether it is current: the answer is 304 until the file changes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from aiohttp import ETag, web

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PREFIX = "/ui/"
PATHS = frozenset(
    _PREFIX + file.relative_to(_FOLDER).as_posix()
    for file in _FOLDER.rglob("*")
    if file.suffix in _TYPES
)
"""Paths of all files. They are public, so they need no API key."""
INDEX = _PREFIX + "index.html"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",  # the text at / is for programs
    "X-Content-Type-Options": "nosniff",
}
"""The page loads nothing from other servers, runs only its own files, and is in no frame."""


def answer(request: web.Request, path: str) -> web.Response:
    """Return one of the files in `PATHS`, or 304 if the browser has it."""
    file = _FOLDER / path.removeprefix(_PREFIX)
    body = file.read_bytes()
    tag = ETag(hashlib.sha256(body).hexdigest()[:32])
    known = request.if_none_match or ()
    current = any(one.value in {tag.value, "*"} for one in known)
    response = web.Response(status=304) if current else web.Response(body=body)
    if not current:
        response.content_type, response.charset = _TYPES[file.suffix], "utf-8"
    response.etag = tag
    response.headers.update(_HEADERS)
    return response
