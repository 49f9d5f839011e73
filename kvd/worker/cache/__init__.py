"""The paged, quantized KV cache.

A request's keys and values are a *row*: a list of pages of 64 tokens, quantized and shared by
reference, and a dense tail of the newest 64 to 127 tokens (`rows`). Pages are in pools, one per
layer and precision level, which only a flush writes (`pool`, `flush`). A `KVStore` has the rows of
all layers of one attention kind (`store`), and a `ModelCache` has the stores of a model
(`model_cache`). Models see one `BatchQuantizedKVCache` per layer (`batch`); only attention reads
what it returns.
"""
