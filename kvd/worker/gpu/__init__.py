"""Linear layers and decoder layers with fewer operations, for accelerators."""
