"""Cache formats of papers and engines on the same prompts, each at its own exact tokens and at common ones."""
