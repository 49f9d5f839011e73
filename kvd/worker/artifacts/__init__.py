"""What one load keeps for the next: compiled kernels, and the results of checks."""
