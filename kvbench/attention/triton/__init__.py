"""The Triton decode kernel, over every tier of a layer in one launch."""
