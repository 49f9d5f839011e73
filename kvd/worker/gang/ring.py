"""Joins the processes of a gang to one MLX group."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from kvd.worker.gang.control import Peers
from kvd.worker.gang.startup import Backend, Place


def join(place: Place, peers: Peers) -> Any:
    """Return the group of all ranks, once all have joined.

    Holds Python's lock until then, so only another process can end a wait for a rank that does not
    come. Raises ``RuntimeError``, also if only some ranks have a CUDA device.
    """
    rank, addresses, backend = place.rank, place.addresses, place.backend
    if backend == "auto":
        backend = "nccl" if mx.cuda.is_available() else "ring"
    # Ranks with different backends would wait for each other until the daemon's deadline.
    backends = peers.exchange("backend", backend)
    if len({*backends}) > 1:
        raise RuntimeError(
            f"the ranks connect by {', '.join(backends)}: on CUDA, each rank needs a device of its"
            " own; load the model with as many ranks as there are devices"
        )
    with _environment(backend, rank, addresses):
        group = mx.distributed.init(strict=True, backend=backend)
    if group.size() != len(addresses) or group.rank() != rank:
        raise RuntimeError(f"MLX formed a group of {group.size()} ranks, not {len(addresses)}")
    if group.size() > 2:
        mx.distributed.all_sum = ordered_sum
    return group


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


def ordered_sum(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
    """Return the sum of all ranks' arrays, added in the order of the ranks.

    `mx.distributed.all_sum` over more than two ranks adds in an order that depends on an element's
    place, so a row's result would depend on the other rows of its batch (measured: 53 of 256
    elements differ).
    """
    gathered = mx.distributed.all_gather(x[None], group=group, stream=stream)
    found: mx.array = gathered[0]
    for rank in range(1, gathered.shape[0]):
        found = found + gathered[rank]
    return found
