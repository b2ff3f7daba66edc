"""A cache format per layer, keys and values apart, that loses least under a budget."""
