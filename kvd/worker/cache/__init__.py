"""The paged, quantized KV cache.

A sequence's keys and values are a *row*: a list of pages of 64 tokens, quantized and shared by
reference, and a dense tail of the newest 64 to 127 tokens (`rows`). Pages are in pools, one per
layer and precision level (`pool`). Pools are written while the device is idle, or by kernels behind
all steps in flight, mostly by flushes (`flush`). A `KVStore` has the rows of all layers of one
attention kind (`store`), and a `ModelCache` has the stores and recurrent states of a model
(`model_cache`). Models see one cache object per layer (`batch`). It returns a handle that only
kvd's attention can read, or dense arrays for models that need them.
"""
