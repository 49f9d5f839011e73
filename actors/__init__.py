"""The people of kvd: an actor runtime, pure state machines, and the actors that run them.

No MLX, no sockets, no processes: `actors.ports` says what comes in from outside, and
`actors.system.System` is what the daemon builds.
"""
