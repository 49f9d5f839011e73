"""Attention over pages: decode, prefill, and the dense truth that both are tested against."""
