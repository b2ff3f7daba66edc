"""A run's configuration as typed data, and its requirements of the machine."""
