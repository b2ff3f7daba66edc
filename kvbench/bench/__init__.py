"""Benchmarks of kernels and of whole models, and predictions: ``python -m kvbench.bench`` (without Hydra)."""
