"""The CUDA decode kernel, compiled at its first use."""
