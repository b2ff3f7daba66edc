"""Throughput, TPOT and memory against batch and context: the papers' figures, recomputed."""
