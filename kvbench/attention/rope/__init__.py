"""Rotary position embedding as models apply it, and access to the keys before it."""
