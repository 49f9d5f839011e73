"""Modules that MLX compiles at run time on CUDA (`bench.jit.__main__`)."""
