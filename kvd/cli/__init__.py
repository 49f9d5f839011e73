"""`kvctl`: the daemon's remote control.

Data goes to stdout and talk to stderr; `--json` makes the data JSON. Exit codes are those of
`kvd.host.exits`. Speaks to the daemon through `kvd.client` only, so it starts fast and never needs MLX.
"""

from __future__ import annotations


def main() -> None:
    """Run `kvctl`'s command line."""
    from kvd.cli.app import main as run  # noqa: PLC0415 - `kvd serve` takes its options from here

    run()


__all__ = ["main"]
