"""All methods on the bundled model and data, at comparable bytes."""
