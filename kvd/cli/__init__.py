"""`kvctl`: the command line client of the daemon.

Data goes to stdout, messages to stderr; `--json` makes the data JSON. Exit codes are those of
`kvd.host.exits`. Commands reach the daemon through `kvd.client` only. They start fast and never
import MLX.
"""

from __future__ import annotations


def main() -> None:
    from kvd.cli.app import main as run  # noqa: PLC0415 - `kvd serve` imports this package too

    run()


__all__ = ["main"]
