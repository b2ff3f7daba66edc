"""The configuration: one folder per group, one file per choice. Installed as the package `kvbench.conf`."""
