"""Calibration for KVQuant: thresholds of a model's keys, and codebooks, computed on a text."""
