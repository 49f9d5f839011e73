"""Kernels of decode steps and prefill passes for Metal and CUDA: attention, RoPE, pages, tails."""
