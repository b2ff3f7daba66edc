"""The Triton decode kernel, which serves all tiers of a layer in one launch."""
