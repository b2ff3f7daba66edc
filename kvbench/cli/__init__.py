"""The command line: the only part of kvbench that imports Hydra."""
