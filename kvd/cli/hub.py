"""The Hugging Face Hub: which files a model has, and downloads of them that resume.

huggingface_hub writes each attempt to a new file, so that a killed download starts again from its
beginning. Here a part keeps its name, and its checksum covers what an earlier process wrote.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
from msgspec import Meta

from kvd.host.units import MAX_BYTES
from protocol import model_folder
from protocol.errors import DownloadFailed, KvdError, UnknownModel, UnsupportedModel

_CHUNK = 1 << 20
_MAX_FAILURES = 6
"""Attempts in a row that bring no byte."""
_MAX_WAIT_S = 60.0
_MAX_LIST_BYTES = 16 << 20
_TEMPLATES = "additional_chat_templates/"


@dataclass(frozen=True)
class HubFile:
    """A file of a model."""

    name: str
    size: int
    checksum: str
    """SHA-256 of the contents, or the id of the git object: SHA-1 of a header and the contents."""

    @property
    def digest(self) -> Any:
        """A hash object for the contents from their beginning."""
        if len(self.checksum) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class _Large(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class _ListedFile(msgspec.Struct, frozen=True, rename={"name": "rfilename", "git_id": "blobId"}):
    name: str
    size: int | None = None
    git_id: str | None = None
    lfs: _Large | None = None


class _Listed(msgspec.Struct, frozen=True):
    """The Hub's answer about a model, as far as it is used."""

    sha: Annotated[str, Meta(pattern="^[0-9a-f]{40,64}$")]
    siblings: list[_ListedFile] = []


@dataclass(frozen=True)
class HubModel:
    """The files of a model that a load reads."""

    id: str
    revision: str
    """The commit."""
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class Hub:
    """Requests to the Hub, or to what ``HF_ENDPOINT`` names."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: str) -> None:
        self._session = session
        self._endpoint = endpoint.rstrip("/")

    async def model(self, hub_id: str, revision: str) -> HubModel:
        """Return a model's files; raises a `KvdError` if it has none that kvd can load."""
        path = f"/api/models/{hub_id}/revision/{quote(revision, safe='')}"
        failures = _Failures(hub_id)
        while True:
            try:
                async with self._session.get(
                    self._endpoint + path, params={"blobs": "true"}
                ) as reply:
                    failures.check(reply)
                    data = await _read_up_to(reply, _MAX_LIST_BYTES)
            except _FAULTS as error:
                await failures.wait(error)
            else:
                return _model(hub_id, data)

    async def read(self, model: HubModel, file: HubFile, first: int, count: int) -> bytes:
        """Return bytes of a file; fewer at its end."""
        failures = _Failures(model.id)
        headers = {"Range": f"bytes={first}-{first + count - 1}"}
        while True:
            try:
                async with self._session.get(self._url(model, file), headers=headers) as reply:
                    failures.check(reply)
                    if reply.status != 206:
                        await reply.content.readexactly(first)
                    return await _read_up_to(reply, count)
            except _FAULTS as error:
                await failures.wait(error)

    async def fetch(
        self, model: HubModel, file: HubFile, part: Path, advance: Callable[[int], None]
    ) -> None:
        """Complete ``part`` and check it; ``advance`` gets each number of bytes, also negative.

        Raises `DownloadFailed` if the contents differ from what the Hub announces.
        """
        for last in (False, True):
            digest = await self._complete(model, file, part, advance)
            if digest == file.checksum:
                return
            part.unlink()  # noqa: ASYNC240 - at once
            advance(-file.size)
            if last:
                raise DownloadFailed(
                    f"{file.name} of {model.id} has the checksum {digest} instead of"
                    f" {file.checksum}; pull it again later",
                    file=file.name,
                )

    async def _complete(
        self, model: HubModel, file: HubFile, part: Path, advance: Callable[[int], None]
    ) -> str:
        """Download what is missing; return the checksum of everything."""
        digest, failures, most = file.digest, _Failures(model.id), 0
        with part.open("a+b") as stream:
            have = await asyncio.to_thread(_hash_start, stream, digest, file.size)
            advance(have)
            while have < file.size:
                try:
                    async with self._session.get(
                        self._url(model, file), headers={"Range": f"bytes={have}-"}
                    ) as reply:
                        failures.check(reply)
                        if have and reply.status != 206:  # the server sends all of it
                            stream.truncate(0)
                            advance(-have)
                            have, digest = 0, file.digest
                        _check_size(model, file, reply, have)
                        async for chunk in reply.content.iter_chunked(_CHUNK):
                            if have + len(chunk) > file.size:
                                raise _wrong_size(model, file, have + len(chunk))
                            stream.write(chunk)
                            digest.update(chunk)
                            have += len(chunk)
                            advance(len(chunk))
                            if have > most:  # not what an earlier attempt also brought
                                most, failures.count = have, 0
                    if have < file.size:
                        raise _AgainError("the connection ended early")
                except _FAULTS as error:
                    await failures.wait(error)
            stream.flush()
            os.fsync(stream.fileno())
        return str(digest.hexdigest())

    def _url(self, model: HubModel, file: HubFile) -> str:
        return f"{self._endpoint}/{model.id}/resolve/{model.revision}/{quote(file.name)}"


_FAULTS = (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError, ConnectionError)
"""What a later attempt may not meet again."""


@asynccontextmanager
async def connect(environment: Mapping[str, str] = os.environ) -> AsyncIterator[Hub]:
    """Connect with the user's token, which a redirect to another server does not get."""
    token = environment.get("HF_TOKEN") or _saved_token(environment)
    headers = {"Accept-Encoding": "identity"}  # ranges count the bytes of the file itself
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=60.0)
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    async with aiohttp.ClientSession(
        headers=headers,
        timeout=timeout,
        trust_env=True,
        middlewares=[_Token(token, endpoint)] if token else (),
    ) as session:
        yield Hub(session, endpoint)


@dataclass(frozen=True)
class _Token:
    """Adds the token to requests to the Hub itself.

    As a header of the session, aiohttp would refuse it beside a password in ``~/.netrc``.
    """

    token: str
    endpoint: str

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        hub, url = urlsplit(self.endpoint), request.url
        port = hub.port or {"https": 443, "http": 80}.get(hub.scheme)
        if (url.scheme, url.host, url.port) == (hub.scheme, hub.hostname, port):
            request.headers["Authorization"] = f"Bearer {self.token}"
        return await handler(request)


def _saved_token(environment: Mapping[str, str]) -> str:
    home = Path(environment.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    path = Path(environment.get("HF_TOKEN_PATH") or home / "token")
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class _Failures:
    """Attempts in a row that failed, and the time until the next one."""

    def __init__(self, hub_id: str) -> None:
        self._id = hub_id
        self.count = 0

    async def wait(self, error: BaseException) -> None:
        """Wait before the next attempt; raises `DownloadFailed` after too many."""
        self.count += 1
        reason = str(error) or type(error).__name__
        seconds = error.seconds if isinstance(error, _AgainError) else None
        if self.count >= _MAX_FAILURES:
            raise DownloadFailed(
                f"cannot download {self._id}: {reason}; pull it again to continue", model=self._id
            )
        backoff = 0.0 if self.count == 1 else 0.25 * 2**self.count
        await asyncio.sleep(min(_MAX_WAIT_S, backoff if seconds is None else seconds))

    def check(self, reply: aiohttp.ClientResponse) -> None:
        """Raise for a status other than success: a `KvdError`, or one that is tried again."""
        status = reply.status
        if status in {200, 206}:
            return
        if status == 429 or status >= 500:
            raise _AgainError(f"the Hub answers {status} {reply.reason}", _retry_after(reply))
        raise _refusal(self._id, reply)


class _AgainError(aiohttp.ClientError):
    """An answer that another attempt may not get, with the seconds that the server asks for."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


def _retry_after(reply: aiohttp.ClientResponse) -> float | None:
    text = reply.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None


def _refusal(hub_id: str, reply: aiohttp.ClientResponse) -> KvdError:
    status, why = reply.status, reply.headers.get("X-Error-Message", "")
    if status in {401, 403}:
        return UnknownModel(
            f"the Hub refuses {hub_id} ({status}{f': {why}' if why else ''}); check the id, accept"
            " the model's terms on its page, and give a token with HF_TOKEN or `hf auth login`",
            source=hub_id,
        )
    if status == 404:
        return UnknownModel(f"the Hub has no {hub_id} (404); check the id", source=hub_id)
    return DownloadFailed(f"the Hub answers {status} {reply.reason} for {hub_id}", model=hub_id)


def _model(hub_id: str, data: bytes) -> HubModel:
    try:
        listed = msgspec.json.decode(data, type=_Listed)
    except msgspec.DecodeError as error:
        raise DownloadFailed(f"the Hub's list of {hub_id} is not readable: {error}") from error
    files = tuple(_file(hub_id, one) for one in listed.siblings if _is_wanted(one.name))
    names = {file.name for file in files}
    if any(one.name.endswith(".gguf") for one in listed.siblings) and not any(
        name.endswith(".safetensors") for name in names
    ):
        raise UnsupportedModel(
            f"{hub_id} is in the GGUF format, which is not supported; pull the original model",
            source=hub_id,
        )
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise UnsupportedModel(
            f"{hub_id} has no config.json with model*.safetensors, so it is no model for mlx-lm",
            source=hub_id,
        )
    return HubModel(hub_id, listed.sha, files)


def _is_wanted(name: str) -> bool:
    """Return whether a load reads this file, and its name is harmless in paths and terminals."""
    inner = name.removeprefix(_TEMPLATES)
    harmless = name.isprintable() and "/" not in inner and not inner.startswith(".")
    return harmless and model_folder.is_read(inner)


def _file(hub_id: str, listed: _ListedFile) -> HubFile:
    large = listed.lfs
    checksum = large.sha256 if large is not None else listed.git_id or ""
    size = large.size if large is not None else listed.size
    valid = len(checksum) == (64 if large is not None else 40) and checksum.isalnum()
    if size is None or not 0 <= size <= MAX_BYTES or not valid:
        raise DownloadFailed(f"the Hub gives no size and checksum for {listed.name} of {hub_id}")
    return HubFile(listed.name, size, checksum)


def _hash_start(stream: Any, digest: Any, limit: int) -> int:
    """Add what the part has to its checksum and return its size; too long ones are emptied."""
    stream.seek(0, os.SEEK_END)
    size = int(stream.tell())
    if size > limit:
        stream.truncate(0)
        return 0
    stream.seek(0)
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    return size


def _check_size(model: HubModel, file: HubFile, reply: aiohttp.ClientResponse, have: int) -> None:
    """Raise `DownloadFailed` if the server's file has another size than the Hub's list says."""
    total = reply.content_length
    if reply.status == 206:
        begin, _, given = reply.headers.get("Content-Range", "").rpartition("/")
        if not begin.startswith(f"bytes {have}-"):
            raise DownloadFailed(f"the server sends {begin!r:.60} instead of bytes from {have}")
        total = int(given) if given.isdecimal() and len(given) < 20 else None
    if total is not None and total != file.size:
        raise _wrong_size(model, file, total)


def _wrong_size(model: HubModel, file: HubFile, size: int) -> DownloadFailed:
    return DownloadFailed(
        f"{file.name} of {model.id} has {size} bytes instead of {file.size}; pull it again later",
        file=file.name,
    )


async def _read_up_to(reply: aiohttp.ClientResponse, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (more := await reply.content.read(count - len(data))):
        data += more
    return bytes(data)
