"""Tensor parallelism: several processes, one device each, that run one model together."""
