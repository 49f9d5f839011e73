"""kvd: the daemon, its listeners, clients and command lines around the actors."""

__version__ = "0.1.0"
