"""Benchmarks of the kernels alone: ``python -m kvbench.bench kernel | quantize`` (torch and triton, no Hydra)."""
