"""`kvctl`: the daemon's remote control.

Data goes to stdout and talk to stderr; `--json` makes the data JSON. Exit codes are those of
`kvd.exits`. Speaks to the daemon through `kvd.client` only, so it starts fast and never needs MLX.
"""

from kvd.cli.app import app, main

__all__ = ["app", "main"]
