"""The protocols of kvd: messages, framing, sessions and errors. Depends on msgspec only."""
