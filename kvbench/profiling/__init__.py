"""Measuring memory and time. Knows torch and nothing of caches, methods or tasks."""
