"""Quantized, paged caches for mlx-lm's own functions, without the daemon."""
