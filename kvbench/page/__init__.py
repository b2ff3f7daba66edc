"""The report as one web page: its data, its assets, the server that follows runs, and its plots as files."""
