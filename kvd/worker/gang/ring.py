"""Joins the processes of a gang to one MLX group."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvd.worker.gang.control import Peers
from kvd.worker.gang.startup import Backend, Place
from kvd.worker.gang.sums import Sums
from kvd.worker.native.activation import thread_count

SPIN_PROCESSORS = 4
"""Processors per rank from which the ranks spin while they wait for each other.

A rank that waits spins on up to two sockets, and the others compute.
"""
_LISTENER_S = 2.0
"""Seconds to wait for the first rank's listening socket."""
_BLOCK_US = 1000
"""Microseconds after which a blocking socket returns to MLX, which then sends what is queued."""


def join(place: Place, peers: Peers) -> Any:
    """Return the group of all ranks, once all have joined.

    Holds Python's lock until then, so only another process can end a wait for a rank that does not
    come. Raises ``RuntimeError``, also if only some ranks have a CUDA device, or if another program
    connected in a rank's place.
    """
    rank, addresses, backend = place.rank, place.addresses, place.backend
    if backend == "auto":
        backend = "nccl" if mx.cuda.is_available() else "ring"
    # Ranks with different backends would wait for each other until the daemon's deadline.
    # Sums are divided only if the sockets block, so all ranks must agree on that.
    blocks = backend == "ring" and thread_count() < SPIN_PROCESSORS * len(addresses)
    device = mx.device_info().get("uuid", rank) if backend == "nccl" else rank
    backends, blocking, devices = zip(
        *peers.exchange("backend", (backend, blocks, device)), strict=True
    )
    if len({*backends}) > 1 or len({*devices}) < len(devices):
        raise RuntimeError(
            f"the ranks connect by {', '.join(backends)} (devices: {len({*devices})}): on CUDA,"
            " each rank needs a device of its own; load the model with as many ranks as there are"
            " devices"
        )
    if backend == "ring" and rank == len(addresses) - 1:
        _wait_for_listener(addresses[0])
    before = _sockets()
    with _environment(backend, rank, addresses):
        group = mx.distributed.init(strict=True, backend=backend)
    if any(blocking):
        _block_reads(_sockets() - before)
    if group.size() != len(addresses) or group.rank() != rank:
        raise RuntimeError(f"MLX formed a group of {group.size()} ranks, not {len(addresses)}")
    _greet(group)
    if backend == "ring" or group.size() > 2:
        mx.distributed.all_sum = Sums(group, ring=backend == "ring", blocking=any(blocking))
    return group


def _greet(group: Any) -> None:
    """Raise ``RuntimeError`` unless a sum has a term of each rank.

    The ring has no authentication. A program that connected and sends nothing delays the sum until
    the daemon's deadline for the start, which is shorter than the one for the load.
    """
    total = mx.distributed.all_sum(mx.array([1 << group.rank()], mx.int32), group=group)
    if total.item() != (1 << group.size()) - 1:
        raise RuntimeError("another program connected to this rank's port in place of a rank")


@contextlib.contextmanager
def _environment(backend: Backend, rank: int, addresses: list[str]) -> Iterator[None]:
    """Set the variables that MLX reads while it joins a group."""
    values = {"MLX_RANK": str(rank)}
    with contextlib.ExitStack() as stack:
        if backend == "nccl":
            host, _, port = addresses[0].rpartition(":")
            values |= {"NCCL_HOST_IP": host, "NCCL_PORT": port}
            values["MLX_WORLD_SIZE"] = str(len(addresses))
        else:
            # Without a name, so that a rank that is killed meanwhile leaves no file.
            file = stack.enter_context(tempfile.TemporaryFile("w+"))
            json.dump([[address] for address in addresses], file)
            file.seek(0)
            values["MLX_HOSTFILE"] = f"/dev/fd/{file.fileno()}"
        os.environ.update(values)
        try:
            yield
        finally:
            for name in values:
                del os.environ[name]


def _wait_for_listener(address: str) -> None:
    """Return when a socket listens on the address, or after `_LISTENER_S`; Linux only.

    The last rank connects to the first one, and MLX tries again only after 1 s, then 2 s.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + _LISTENER_S
    while sys.platform == "linux" and time.monotonic() < end:
        with socket.socket() as sock:
            # Linux refuses this only beside a socket that listens. On macOS it would block MLX's.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, int(port)))
            except OSError:
                return
        time.sleep(0.001)


def _sockets() -> set[int]:
    """Return the file descriptors of this process's sockets."""
    found = set()
    for file in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            if stat.S_ISSOCK(os.fstat(int(file.name)).st_mode):
                found.add(int(file.name))
    return found


def _block_reads(files: set[int]) -> None:
    """Make reads of these sockets blocking, which MLX has made non-blocking.

    Otherwise reads spin. On two cores, two ranks of the embedded model took 7.0 and 8.3 s for 200
    tokens beside other processes, and take 2.7 s; their CPU time fell from 15.9 to 7.4 s. A thread
    receives before it sends. If both are queued, the time limit ends the wait; `Sums` avoids that.
    """
    limit = struct.pack("@ll", 0, _BLOCK_US)
    for file in files:
        with socket.socket(fileno=os.dup(file)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        os.set_blocking(file, True)
