"""kvd as a service of the user's session: launchd on macOS, systemd on Linux.

`notify` and `activation` are the daemon's side of it; the rest is what `kvctl service` does.
"""
