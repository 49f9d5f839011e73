"""Attention over pages: prefill and decode in plain MLX operations, decode also in GPU kernels."""
