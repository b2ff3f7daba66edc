"""Evaluation by lm-evaluation-harness: its tasks and metrics, with generation and likelihoods through a KV cache."""
