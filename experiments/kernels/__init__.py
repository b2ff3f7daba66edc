"""The fused kernels inside whole models."""
