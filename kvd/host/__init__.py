"""What the operating system provides: sockets, logs, files, memory readings, exit codes."""
