"""A run's configuration as typed data, and what it needs of the machine."""
