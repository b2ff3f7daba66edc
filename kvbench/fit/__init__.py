"""``python -m kvbench.fit``: what fits a model and a card, how fast, how exact, with which flags. Imports no torch."""
