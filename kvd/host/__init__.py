"""The operating system: sockets, logs, files, memory readings and exit codes."""
