"""The engine process, one per model: the only code that imports MLX. Knows only `protocol`."""
