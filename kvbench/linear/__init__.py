"""Products of a few rows with a weight matrix: kernels for 16-bit and for 4-bit weights."""
