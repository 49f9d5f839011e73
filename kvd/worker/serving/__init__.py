"""Loading a model and deciding how to serve it: files, probe, checks, forward passes."""
