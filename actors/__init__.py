"""An actor runtime, pure state machines, and the actors that run them.

No MLX, sockets or processes: `actors.ports` declares what comes from outside. The daemon constructs
`actors.system.System`.
"""
