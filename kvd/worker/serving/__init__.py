"""Loading a model and choosing how to serve it: files, probes, checks, forward passes."""
