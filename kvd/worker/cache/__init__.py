"""The paged, quantized KV cache.

A request's keys and values are a *row*: a list of pages of 64 tokens, quantized and shared by
reference, and a dense tail of the newest 64 to 127 tokens (`rows`). Pages live in pools, one per
layer and level, that are written only at a flush (`pool`, `store`). The models see one
`BatchQuantizedKVCache` per layer (`batch`), and only attention looks inside what it returns.
"""
