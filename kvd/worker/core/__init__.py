"""The engine over MLX: batches requests, runs their steps, and preempts and recovers rows."""
