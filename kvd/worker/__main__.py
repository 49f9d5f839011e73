"""The worker process: ``python -m kvd.worker FD [--engine mlx|fake]``.

FD is the worker's end of a socketpair, inherited from the daemon. Only this module imports an
engine, so that a process with the fake engine never imports MLX.
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

from kvd.worker.process import interpreter
from kvd.worker.process.link import Orphaned
from kvd.worker.process.loop import Loop
from kvd.worker.process.memory_limit import limit
from kvd.worker.process.orphan import die_with_parent

if TYPE_CHECKING:
    from kvd.worker.engine import Engine


def main() -> NoReturn:
    """Run until the daemon stops the worker or is gone."""
    parser = argparse.ArgumentParser(
        prog="kvd.worker", description="The worker process of one model."
    )
    parser.add_argument("fd", type=int, help="file descriptor of the socket to the daemon")
    parser.add_argument("--engine", choices=["mlx", "fake"], default="mlx")
    arguments = parser.parse_args()
    # Ctrl-C and a closing terminal send their signals to the whole process group. The daemon
    # handles them and stops its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sock = socket.socket(fileno=arguments.fd)
    sock.set_inheritable(False)
    die_with_parent(sock)
    limit.enabled = True
    interpreter.prepare()
    status = 0
    try:
        Loop(sock, _engine(arguments.engine)).run()
    except Orphaned:
        pass
    except BaseException:  # noqa: BLE001 - os._exit below would hide the error
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's normal exit would wait for threads and for the device.
    os._exit(status)


def _engine(name: str) -> Engine:
    if name == "fake":
        from kvd.worker.fake.engine import FakeEngine  # noqa: PLC0415 - must not import MLX

        return FakeEngine()
    from kvd.worker import lean_imports  # noqa: PLC0415

    lean_imports.install()
    from kvd.worker.core.engine import MLXEngine  # noqa: PLC0415 - imports MLX

    return MLXEngine()


if __name__ == "__main__":
    main()
