"""Models: loading, random weights, the bundled model, and checks that kvbench supports an architecture."""
