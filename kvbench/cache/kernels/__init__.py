"""Kernels that write to the stores (quantize and pack, append, roll), and the host code that launches them."""
