"""The names of rotations, as ``method.rotation.key`` and ``method.rotation.value`` take them. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from kvbench.errors import ConfigError

Side = Literal["key", "value"]
SIDES: tuple[Side, Side] = ("key", "value")

#: rotations with a name; ``blocks:N`` and files come in addition
NAMES = ("none", "hadamard", "rht", "rht_unnormalised", "octave")
ALLOWED = (*NAMES, "blocks:N", "FILE.safetensors")
#: suffix of files with one matrix per layer and side
SUFFIX = ".safetensors"
#: length of the blocks of keys in ``octave``, and of values whose channels are no power of two
OCTAVE_BLOCK = 64
_BLOCKS = re.compile(r"blocks:?(\d+)")


@dataclass(frozen=True)
class RotationSpec:
    """The rotations of keys (with the queries) and of values (with the output) of every head.

    Args:
        key: rotation of keys and queries after RoPE. ``none``; ``hadamard``: a Hadamard matrix (Sylvester's),
            orthonormal, in blocks of the largest power of two that divides the head; ``rht``: the same after
            pseudo-random changes of sign (vLLM's); ``rht_unnormalised``: the same, not divided by the square root of
            the block (as vLLM's int4 cache stores it); ``blocks:N``: Hadamard matrices in blocks of N channels
            (SAW-INT4, llama.cpp); ``octave``: vLLM's Octave, with other signs and in blocks of 64 channels;
            ``FILE.safetensors``: a matrix per layer, named ``key.LAYER`` (OSCAR).
        value: rotation of values and output, with the same choices. ``octave`` rotates whole heads of values if their
            channels are a power of two; in a file, the matrices of values are named ``value.LAYER``.
    """

    key: str = "none"
    value: str = "none"

    #: names of rotations that only the method of a subclass has, by side
    extra: ClassVar[dict[Side, tuple[str, ...]]] = {"key": (), "value": ()}

    def __post_init__(self) -> None:
        for side in SIDES:  # blocks16, which needs no quotes in a setting, is blocks:16
            block = _BLOCKS.fullmatch(getattr(self, side))
            if block is not None:
                object.__setattr__(self, side, f"blocks:{int(block[1])}")

    def of(self, side: Side) -> str:
        """Return the name of a side's rotation."""
        return self.key if side == "key" else self.value

    @property
    def plain(self) -> bool:
        """True if nothing is rotated."""
        return self.key == self.value == "none"

    def check(self, head_dim: int | None = None) -> None:
        """Raise ConfigError if a name is unknown, a file does not exist, or blocks do not fit the head.

        `head_dim` is the channels per head; None if not known yet.
        """
        for side in SIDES:
            name, key = self.of(side), f"method.rotation.{side}"
            if name in self.extra[side]:
                continue
            if name.endswith(SUFFIX):
                if not Path(name).is_file():
                    raise ConfigError(
                        key, name, "there is no such file", hint="calibrate first, or choose a named rotation"
                    )
                check_file(name, side, head_dim)
                continue
            if name not in NAMES and not _BLOCKS.fullmatch(name):
                hint = f"{key}=blocks:16" if name.startswith("blocks") else ""
                raise ConfigError(key, name, "no such rotation", allowed=(*self.extra[side], *ALLOWED), hint=hint)
            block = 1 if name == "none" else block_of(name, side, head_dim)
            if block is None:
                continue
            if name != "none" and (block < 2 or block & (block - 1)):
                raise ConfigError(key, name, "needs blocks of a power of two", hint=f"{key}=blocks:16")
            if head_dim is not None and head_dim % block:
                raise ConfigError(
                    key,
                    name,
                    f"rotates blocks of {block} channels, which do not divide the head's {head_dim}",
                    allowed=f"blocks of up to {power_of_two(head_dim)} channels",
                    hint=f"{key}=hadamard",
                )

    def identity(self) -> dict[str, str]:
        """Return the two names for a run's identity; the path of a file is replaced by a digest of its content."""
        names = {"key": self.key, "value": self.value}
        return {
            side: hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16] if name.endswith(SUFFIX) else name
            for side, name in names.items()
        }


def check_file(path: str, side: Side, head_dim: int | None = None) -> None:
    """Raise ConfigError if a file of rotations is damaged, has no matrix of a side, or has one of another size.

    Only the file's header is read. `head_dim` is the channels per head; None if not known yet.
    """
    from safetensors import SafetensorError, safe_open

    key = f"method.rotation.{side}"
    try:
        with safe_open(path, framework="numpy") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            key,
            path,
            f"is not a safetensors file, or is damaged ({error})",
            hint="calibrate again, or choose a named rotation",
        ) from error
    mine = {name: shape for name, shape in shapes.items() if name.startswith(f"{side}.")}
    if not mine:
        others = f", but {len(shapes)} others, such as '{next(iter(shapes))}'" if shapes else ""
        raise ConfigError(key, path, f"has no matrix '{side}.0'{others}", hint="calibrate for this model")
    for name, shape in mine.items():
        if len(shape) not in (2, 3) or shape[-2] != shape[-1] or (head_dim or shape[-1]) != shape[-1]:
            which = f"the heads have {head_dim} channels" if head_dim else "a matrix must be square"
            raise ConfigError(
                key, path, f"has a matrix '{name}' of shape {shape}, but {which}", hint="calibrate for this model"
            )


def block_of(name: str, side: Side, channels: int | None = None) -> int | None:
    """Return the number of channels that a rotation other than ``none`` mixes.

    A result of None stands for the largest power of two that divides the channels of a head. `channels` is their
    number; None if not known yet.
    """
    if name.startswith("blocks:"):
        return int(name.partition(":")[2])
    whole = side == "value" and (channels is None or channels == power_of_two(channels))
    return OCTAVE_BLOCK if name == "octave" and not whole else None


def power_of_two(channels: int) -> int:
    """Return the largest power of two that divides a number of channels."""
    return channels & -channels
