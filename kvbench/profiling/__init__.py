"""Measurement and prediction of memory and time; depends on torch, but not on caches, methods or tasks."""
