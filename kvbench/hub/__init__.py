"""The Hugging Face hub: fast checks before downloads, verified downloads, and a record of the commits downloaded."""
