"""The worker process around the engine: its loop, socket, time slices and memory readings."""
