"""lm-evaluation-harness as a host: its tasks and metrics, with generation and likelihoods through a KV cache."""
