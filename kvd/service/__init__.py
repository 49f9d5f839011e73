"""kvd as a service of the user's session: launchd on macOS, systemd on Linux."""
