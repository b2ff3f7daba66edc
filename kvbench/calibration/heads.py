"""The sizes of heads that OSCAR can be calibrated for. Imports no torch."""

from __future__ import annotations

from kvbench.errors import ConfigError


def check_head(channels: int) -> None:
    """Raise ConfigError if heads of `channels` channels cannot be calibrated: their number must be a power of two."""
    if channels < 2 or channels & (channels - 1):
        raise ConfigError(
            "method",
            "oscar",
            f"the model's heads have {channels} channels, but the bit reversal of OSCAR's rotation requires a power "
            "of two",
            hint="method=kivi method.rotation.key=hadamard method.rotation.value=hadamard",
        )
