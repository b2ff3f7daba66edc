"""Experiments: the grids of the papers, and how the bundled model was trained."""
