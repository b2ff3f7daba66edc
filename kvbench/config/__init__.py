"""A run's configuration as typed data, and checks that the machine has what it requires."""
