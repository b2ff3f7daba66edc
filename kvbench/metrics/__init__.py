"""Metrics: functions from predictions and references to scores."""
