"""Exit statuses of the processes of a gang, which is one model over several ranks."""

from __future__ import annotations

DIVERGED = 72
"""Exit status of a rank that was about to compute something else than the leader."""
PEER_LOST = 73
"""Exit status of a rank that ended because another rank or its connection to it is gone. The other
rank's exit says why."""
