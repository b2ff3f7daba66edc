"""What a run leaves on disk: its identity, its directory, its aggregates and its tables."""
