"""The worker process around its engine: commands in, reports out, memory readings."""
