"""The words of kvd: messages, framing, sessions and errors. Imports msgspec and nothing of ours."""
