"""Kernels of decode steps for Metal and CUDA: flash decoding over pages, RoPE, tail updates."""
