"""Rotary position embedding as models apply it, and keys before it."""
