"""Benchmarks of the kernels alone and predictions: ``python -m kvbench.bench`` (torch and triton, no Hydra)."""
