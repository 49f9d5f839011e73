"""What is right and wrong with kvd on this machine, and what to do: `kvctl doctor`.

A check is a function from a `Scene` to findings. It reads, and changes nothing. `selftest` goes
further: it computes, starts processes and a daemon, in places of their own.
"""
