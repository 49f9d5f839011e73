"""Drawing tokens: keys, edits of the logits, filters and draws, logprobs.

`kvd.worker.sampling.sampler` is what the engine uses of it.
"""
