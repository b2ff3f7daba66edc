"""The tables and figures of the LogQuant paper, one file each."""
