"""Attention over pages: decode and prefill, in plain operations and in kernels."""
