"""Benchmark of what a quantized KV cache costs in quality, by scheme, key layout and length.

Schemes are tried by *fake quantization*. A cache holds dense arrays (`cache`). When a page is due
to be quantized, it is *sealed*: quantized, dequantized and written back (`recipes`). So any layout
can be tried, including those that kvd does not have. A test checks that kvd's own pages give the
same numbers.
"""
