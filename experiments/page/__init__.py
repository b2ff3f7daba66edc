"""Measurements of the report's page with made-up runs."""
