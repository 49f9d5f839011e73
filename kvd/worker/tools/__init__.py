"""Programs that measure a model or this machine without the daemon."""
