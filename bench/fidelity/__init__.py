"""What a quantized KV cache costs a model in quality, by scheme, key layout and length.

Schemes are tried by *fake quantization*: a cache that holds dense arrays and replaces what is
sealed by what its quantized form stands for (`cache`, `recipes`). So any layout can be tried,
also those that the product has not. That the product's own pages give the same numbers is a test.
"""
