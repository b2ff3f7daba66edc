"""kvbench: accuracy, memory and time of KV-cache methods, measured on the same model, data and machine."""

__version__ = "0.1.0"
