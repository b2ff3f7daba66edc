"""Results on disk: run ids, the directory of a run, `metrics.json`, and tables."""
