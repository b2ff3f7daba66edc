"""Points of time and memory: a prompt length and a batch, through a model and a method's cache."""
