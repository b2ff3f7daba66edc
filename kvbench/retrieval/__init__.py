"""Chunk-level search over a prompt's context: chunks, encoders, thresholds (Cocktail, module I)."""
