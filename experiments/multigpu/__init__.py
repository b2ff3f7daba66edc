"""Two GPUs against one: the same tokens, and memory and time of a 7B model at 128k tokens."""
