"""Models: loading, random weights, the bundled model, and which architectures are served."""
