"""Results on disk: a run's identity, its directory, its aggregates and its tables."""
