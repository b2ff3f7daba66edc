"""What every other package may use: whole files, failures, progress, schemas, where the configuration lies."""
