"""A scripted daemon: answers requests over a real socket, in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from protocol import messages as m
from protocol.explain_messages import Explain
from protocol.model_source import unknown_model
from protocol.prefix_messages import Cache, CacheDrop, CacheDropped, CacheReply
from protocol.segments import PrefixSpace, PrefixStoreStatus
from protocol.session import ServerSession
from protocol.types import (
    DaemonStatus,
    HostMemory,
    MemoryUse,
    ModelInfo,
    ModelStatus,
    PrefixUse,
    Usage,
    WorkerStats,
)

Answer = Callable[[m.Request], Iterable[m.Event | None]]
"""Events for a request; None closes the connection."""
STRANGE = (
    r"a\[/b]",
    "[/b]",
    r"\[a^2 + b^2\]",
    "\\",
    r"\\\[x]",
    "[bold]",
    "C:\\[1]\\",
    ":smile:",
    "{}{0}",
    "[",
)
"""Names and values that look like markup, an emoji or a format."""


@contextlib.contextmanager
def stub_daemon(path: Path, answer: Answer) -> Iterator[list[m.Request]]:
    """Serve until the block ends; yields the list of received requests."""
    requests: list[m.Request] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=_accept, args=(listener, answer, requests), daemon=True)
        thread.start()
        yield requests
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def _accept(listener: socket.socket, answer: Answer, requests: list[m.Request]) -> None:
    threads: list[threading.Thread] = []
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            break
        one = threading.Thread(target=_serve, args=(peer, answer, requests), daemon=True)
        one.start()
        threads.append(one)
    for one in threads:
        one.join(5)


def _serve(peer: socket.socket, answer: Answer, requests: list[m.Request]) -> None:
    with peer, contextlib.suppress(ConnectionError):
        _converse(peer, answer, requests)


def _converse(peer: socket.socket, answer: Answer, requests: list[m.Request]) -> None:
    session = ServerSession()
    while data := peer.recv(65536):
        for request in session.receive(data):
            assert not isinstance(request, m.Error), request
            requests.append(request)
            for event in answer(request):
                if event is None:
                    return
                peer.sendall(session.send(event) if event.id else session.refuse(event))


INFO = ModelInfo(
    architecture="qwen3",
    parameters=5_800_000,
    context_length=16384,
    vocab_size=4096,
    layers=6,
    dtype="float32",
    kv_scheme="k8v8",
    kv_layout="keys per channel, values per token",
    page_bytes=104448,
    kv_bytes_per_token=1632,
    attention_path="reference",
    attention_error=0.001,
    has_chat_template=True,
    device="cpu",
)
MODEL = ModelStatus(
    name="demo",
    source="demo",
    state="ready",
    worker_pid=4242,
    granted_bytes=90 * 2**20,
    info=INFO,
    stats=WorkerStats(
        rows_running=3,
        rows_waiting=2,
        max_rows_in_step=8,
        pages_used=17,
        pages_total=64,
        tokens_per_s=312.4,
        memory=MemoryUse(weights=23_200_000, kv_pages_used=1_775_616, footprint=180 * 2**20),
        prefix=PrefixUse(
            queries=9, query_tokens=4000, hit_tokens=3320, checkpoints=3, held=3 << 20, evicted=1
        ),
    ),
)


def daemon_status(*models: ModelStatus) -> DaemonStatus:
    return DaemonStatus(
        version="0.1.0",
        pid=4241,
        uptime_s=3723.0,
        home="/home/someone/.kvd",
        state="serving",
        budget_bytes=2**30,
        granted_bytes=sum(model.granted_bytes for model in models),
        footprint_bytes=40 * 2**20,
        host=HostMemory(total=16 * 2**30, available=9 * 2**30),
        models=list(models),
    )


def well(request: m.Request) -> Iterable[m.Event | None]:  # noqa: C901, PLR0912 - one match
    """Answer like a daemon with one model and no errors."""
    number = request.id
    match request:
        case m.Hello():
            yield m.HelloReply(id=number, version="0.1.0", protocol=1, pid=4241, home="/h")
        case m.Status():
            yield m.StatusReply(id=number, status=daemon_status(MODEL))
        case m.Pin(model=model) | m.Unpin(model=model):
            yield m.Pinned(id=number, model=model, pinned=isinstance(request, m.Pin))
        case m.Configure(budget_bytes=total):
            yield m.Configured(id=number, budget_bytes=total or 2**30, granted_bytes=2**20)
        case m.Events():
            yield m.EventRecord(
                id=number,
                seq=1,
                at=0.0,
                kind="evict",
                model=request.model or "demo",
                reason="the load of other",
                requester="other",
                numbers={"freed_bytes": 2**30, "level": 1},
            )
            if not request.follow:
                yield m.EventsReply(id=number, last=1)
        case m.Load(model=model):
            yield m.Loading(id=number, model=model, stage="weights", fraction=0.5)
            yield m.Loaded(id=number, model=MODEL)
        case m.Unload(model=model):
            yield m.Unloaded(id=number, model=model, freed_bytes=2**20)
        case Explain(model=model):
            yield m.Error(id=number, error=unknown_model(model, [MODEL.name], []).info())
        case m.Generate():
            yield m.Accepted(id=number, prompt_tokens=3, seed=7)
            yield m.Tokens(id=number, index=0, tokens=[1], text="Grüße")
            yield m.Tokens(id=number, index=1, tokens=[2, 3], text=" all")
            yield m.Done(id=number, reason="stop", usage=Usage(3, 3))
        case m.Tokenize(prompt=prompt, messages=chat, limit=most, texts=texts):
            text = prompt if chat is None else "".join(message.content for message in chat)
            tokens = list((text or "").encode())[:most]
            yield m.Tokenized(
                id=number,
                count=len((text or "").encode()),
                tokens=tokens,
                texts=[chr(token) for token in tokens] if texts else [],
            )
        case Cache():
            store = PrefixStoreStatus(
                state="on",
                limit_bytes=20 * 2**30,
                daily_bytes=50 * 2**30,
                keep_free_bytes=5 * 2**30,
                segments=3,
                stored_bytes=2**30,
                written_today_bytes=2**20,
                written_bytes=2**31,
            )
            space = PrefixSpace(models=["demo", "other"], segments=3, tokens=4096, nbytes=2**30)
            yield CacheReply(id=number, store=store, spaces=[space])
        case CacheDrop():
            yield CacheDropped(id=number, segments=2, freed_bytes=2**20)
        case m.Cancel(target=target):
            yield m.Cancelled(id=number, target=target, found=False)
        case m.Drain():
            yield m.Drained(id=number)
        case m.Shutdown():
            yield m.ShutdownReply(id=number)
            yield None
