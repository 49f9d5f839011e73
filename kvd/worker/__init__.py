"""The worker: one process per model, and the only code that imports MLX."""
