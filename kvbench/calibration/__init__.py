"""What KVQuant needs to know of a model beforehand: thresholds of its keys and codebooks, found on a text."""
