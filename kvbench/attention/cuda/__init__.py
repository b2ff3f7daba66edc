"""The CUDA decode kernel, compiled at first use."""
