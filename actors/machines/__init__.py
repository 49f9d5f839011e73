"""Pure decisions: events in, commands out. No loop, no clock, no randomness, no log."""
