"""The daemon's side of a gang's processes, for tests."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections import defaultdict

from protocol.worker import RowTokens
from tests.ports import free_addresses
from tests.worker.process.peer import Peer


class GangProcesses(Peer):
    """A gang of worker processes. The peer is the leader's socket."""

    deadline_s = 240.0
    """Each layer waits for all ranks, so a busy machine delays them a lot."""

    def __init__(self, ranks=2, engine="mlx", programs=None, **options):
        """``programs``: Python code that a rank runs before its own program, by rank."""
        pairs = [socket.socketpair() for _ in range(ranks)]
        controls = [socket.socketpair() for _ in range(1, ranks)]
        self.addresses = free_addresses(ranks)
        ring = ",".join(self.addresses)
        self.processes = []
        for rank in range(ranks):
            own = [mine for mine, _ in controls] if rank == 0 else [controls[rank - 1][1]]
            fds = [one.fileno() for one in own]
            link = pairs[rank][1].fileno()
            code = (programs or {}).get(rank, "") + "\nfrom kvd.worker.__main__ import main\nmain()"
            if engine == "mlx":
                # Workers do it before any import of mlx-lm, and a rank's program may import it.
                code = f"from kvd.worker import lean_imports\nlean_imports.install()\n{code}"
            command = [sys.executable, "-c", code, str(link), "--engine", engine]
            command += ["--ranks", str(ranks), "--rank", str(rank), "--ring", ring]
            command += ["--controls", ",".join(map(str, fds))]
            self.processes.append(
                subprocess.Popen(command, pass_fds=[link, *fds], stderr=subprocess.PIPE, text=True)
            )
        for _, end in pairs:
            end.close()
        for one in (end for pair in controls for end in pair):
            one.close()
        self.links = [mine for mine, _ in pairs]
        super().__init__(self.links[0], **options)

    def wait(self, timeout_s=deadline_s):
        """Return the exit status of each rank, once all have exited."""
        return [process.wait(timeout_s) for process in self.processes]

    def errors(self):
        return [process.stderr.read() for process in self.processes]

    def signal(self, rank, number):
        self.processes[rank].send_signal(number)

    def exit_report(self):
        """Return those of all ranks; -9 is a rank that still ran."""
        self._kill()
        return self.wait(), self.errors()

    def close(self):
        for link in self.links:
            link.close()
        self._kill()
        for process in self.processes:
            process.wait()
            process.stderr.close()

    def _kill(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)


def tokens_of(worker, rid):
    """Return the tokens of each choice of a request."""
    found = defaultdict(list)
    for report in worker.of(RowTokens, rid):
        found[report.choice] += report.tokens
    return dict(found)
