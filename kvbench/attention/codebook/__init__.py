"""Decode attention over codes of a codebook: looked-up levels, keys rotated on the way, outliers in addition."""
