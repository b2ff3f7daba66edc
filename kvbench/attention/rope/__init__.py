"""Rotary position embedding as models apply it, and access to keys before RoPE."""
