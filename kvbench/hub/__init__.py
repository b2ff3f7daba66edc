"""The Hugging Face hub: one request before any download, verified downloads, and a record of what was fetched first."""
