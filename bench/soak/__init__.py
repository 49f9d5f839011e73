"""A long run of one daemon under mixed traffic and faults, with samples of what might grow."""
