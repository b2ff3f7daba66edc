"""Models with 4-bit weights: checkpoints in the formats AWQ and GPTQ, and weights rounded while they are loaded."""
