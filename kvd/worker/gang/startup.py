"""How a process learns its rank, from its command line; imports no MLX.

::

    python -m kvd.worker FD --ranks 3 --rank 0 --ring H:P,H:P,H:P --controls 5,6
    python -m kvd.worker FD --ranks 3 --rank 2 --ring H:P,H:P,H:P --controls 4
"""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass
from typing import Literal

Backend = Literal["auto", "ring", "nccl"]
"""How MLX connects the ranks; ``auto``: NCCL on CUDA devices, otherwise sockets."""


@dataclass(frozen=True)
class Place:
    """The place of this process in its gang."""

    rank: int
    addresses: list[str]
    """``host:port`` of each rank, for MLX."""
    controls: list[socket.socket]
    """Sockets to the followers, by rank; of a follower: the socket to the leader."""
    backend: Backend = "auto"

    @property
    def ranks(self) -> int:
        return len(self.addresses)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the model")
    parser.add_argument("--rank", type=int, default=0, help="number of this one; 0 leads")
    parser.add_argument("--ring", default="", help="HOST:PORT of each rank, separated by commas")
    parser.add_argument("--controls", default="", help="file descriptors of the control sockets")
    parser.add_argument("--backend", choices=["auto", "ring", "nccl"], default="auto")


def place_of(arguments: argparse.Namespace) -> Place | None:
    """Return the place that the arguments name; None: the process is alone.

    Raises ``ValueError`` if they contradict each other.
    """
    if arguments.ranks == 1:
        return None
    addresses = arguments.ring.split(",")
    controls = [int(one) for one in arguments.controls.split(",")]
    others = arguments.ranks - 1 if arguments.rank == 0 else 1
    if not 0 <= arguments.rank < arguments.ranks == len(addresses) or len(controls) != others:
        raise ValueError(
            f"rank {arguments.rank} of {arguments.ranks} needs {arguments.ranks} addresses and"
            f" {others} control sockets, not {len(addresses)} and {len(controls)}"
        )
    sockets = [socket.socket(fileno=fd) for fd in controls]
    for sock in sockets:
        sock.set_inheritable(False)
    return Place(arguments.rank, addresses, sockets, arguments.backend)
