"""``python -m kvbench.publish``: sends finished runs and sweeps to Weights & Biases after the fact."""
