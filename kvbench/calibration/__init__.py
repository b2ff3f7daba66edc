"""Calibration on a text: KVQuant's thresholds and codebooks, and OSCAR's rotations."""
