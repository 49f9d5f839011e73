"""Fused decode attention: split-K flash decoding straight from the page table."""
