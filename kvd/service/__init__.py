"""kvd as a service of the user's session: launchd on macOS, systemd on Linux.

The daemon uses `notify` and `activation`; `kvctl service` uses the rest.
"""
