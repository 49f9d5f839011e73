"""Checks of the machine, the home, the daemon and the service: `kvctl doctor`.

A check is a function from a `Scene` to findings and changes nothing. `selftest` also computes, and
starts processes and a daemon in separate homes.
"""
