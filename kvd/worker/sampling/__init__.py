"""Sampling: random keys, logit edits, filters, draws and logprobs. The engine uses `sampler`."""
