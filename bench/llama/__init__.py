"""llama.cpp's server as a side of `bench.serve`: its settings, and the model in its format.

``build.sh`` builds the server. `gguf` writes a model folder in the GGUF format.
"""
