"""The worker process: ``python -m kvd.worker FD [--engine mlx|fake]``.

FD is the worker's end of a socketpair, inherited from the daemon. Only this module imports an
engine, so that a process with the fake engine never imports MLX. A model over several ranks has
one such process per rank (`kvd.worker.gang.startup` has their arguments).
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from kvd.worker.gang import startup
from kvd.worker.gang.control import Channel, Diverged, FollowerPeers, PeerLost
from kvd.worker.gang.startup import Place
from kvd.worker.process import interpreter
from kvd.worker.process.link import Link, Orphaned
from kvd.worker.process.loop import Loop
from kvd.worker.process.memory_limit import limit
from kvd.worker.process.orphan import die_with_parent
from protocol import worker as wire
from protocol.gang import DIVERGED, PEER_LOST

if TYPE_CHECKING:
    from kvd.worker.engine import Engine


def main() -> NoReturn:
    """Run until the daemon stops the worker or is gone."""
    parser = argparse.ArgumentParser(
        prog="kvd.worker", description="The worker process of one model."
    )
    parser.add_argument("fd", type=int, help="file descriptor of the socket to the daemon")
    parser.add_argument("--engine", choices=["mlx", "fake"], default="mlx")
    startup.add_arguments(parser)
    arguments = parser.parse_args()
    place = startup.place_of(arguments)
    # Ctrl-C and a closing terminal send their signals to the whole process group. The daemon
    # handles them and stops its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sock = socket.socket(fileno=arguments.fd)
    sock.set_inheritable(False)
    die_with_parent(sock, () if place is None else place.controls)
    limit.enabled = True
    interpreter.prepare()
    status = 0
    try:
        _run(sock, arguments.engine, place)
    except Orphaned:
        pass
    except PeerLost:
        status = PEER_LOST
    except Diverged as error:
        logging.getLogger("kvd.worker").critical("the gang ends: %s", error)
        status = DIVERGED
    except BaseException:  # noqa: BLE001 - os._exit below would hide the error
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's normal exit would wait for threads and for the device.
    os._exit(status)


def _run(sock: socket.socket, engine: str, place: Place | None) -> None:
    if place is not None and place.rank:
        _follow(sock, engine, place)
    else:
        Loop(sock, _engine(engine, place)).run()


def _engine(name: str, place: Place | None) -> Engine:
    if name == "fake":
        from kvd.worker.fake.engine import FakeEngine  # noqa: PLC0415 - must not import MLX

        return FakeEngine()
    from kvd.worker import lean_imports  # noqa: PLC0415

    lean_imports.install()
    if place is None:
        from kvd.worker.core.engine import MLXEngine  # noqa: PLC0415 - imports MLX

        return MLXEngine()
    from kvd.worker.core.engine import MLXEngine  # noqa: PLC0415
    from kvd.worker.gang.leader import Gang  # noqa: PLC0415

    return MLXEngine(gang=Gang.join(place))


def _follow(sock: socket.socket, engine: str, place: Place) -> None:
    """Run a follower until the leader or the daemon ends."""
    peers = FollowerPeers(Channel(place.controls[0]), place.rank, place.ranks)
    link = Link(sock)
    if engine == "fake":
        link.put(wire.Started(pid=os.getpid()))
        link.flush()
        while True:
            peers.receive()
    from kvd.worker import lean_imports  # noqa: PLC0415

    lean_imports.install()
    from kvd.worker.gang import follower, ring  # noqa: PLC0415 - imports MLX

    group = ring.join(place, peers)
    link.put(wire.Started(pid=os.getpid()))
    link.flush()
    follower.run(peers, group)


if __name__ == "__main__":
    main()
