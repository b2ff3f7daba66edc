"""llama.cpp beside kvbench on the same weights and tokens: what a cache format costs in each, and how far they differ.

llama.cpp reads a GGUF file of float32 weights, dequantized from the file that kvbench converted, so that nothing but
attention and the cache differs; the file with quantized weights is a table of its own.
"""
