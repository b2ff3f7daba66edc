"""Kernels over the stores: quantize and pack, append, roll; and what the host does for them."""
