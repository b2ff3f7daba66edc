"""TurboQuant: keys rotated and rounded to the levels of a normal distribution, values on a uniform grid.

Source: Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate" (ICLR 2026, arXiv
2504.19874), and vLLM 0.33, whose four presets this method has (``--kv-cache-dtype turboquant_4bit_nc``): Hadamard
instead of random rotations, normalised levels ("nc"), no sketch of the residual, and the first and last two layers in
full precision. ``rotation.key=random``, ``nc_at=none`` and ``qjl=true`` are the paper's choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.errors import CombinationError, ConfigError
from kvbench.methods.base import SIDES, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.engine import OWN
from kvbench.methods.tokenwise import FormatMethod, StoredFormat
from kvbench.models.layer_types import layer_types
from kvbench.quantizers.spec import FormatSpec
from kvbench.rotation.spec import RotationSpec
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer
    from kvbench.quantizers.affine import AffineQuantizer
    from kvbench.rotation import Transform

#: bits of keys and of values of vLLM's presets; keys of 8 bits are e4m3 numbers
FORMATS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
#: name of the rotation by a random orthogonal matrix
RANDOM = "random"
#: kinds of layers with softmax attention in a model's configuration
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True)
class TurboRotation(RotationSpec):
    """The rotations of keys and of values.

    Args:
        key: ``engine``: as in vLLM, ``hadamard``, or ``none`` for k8v4; ``random``: a random orthogonal matrix (the
            paper); or a rotation as in :class:`RotationSpec`.
        value: rotation of values, which neither the paper nor vLLM rotates.
    """

    key: str = OWN
    value: str = "none"

    extra: ClassVar[dict[Side, tuple[str, ...]]] = {"key": (OWN, RANDOM), "value": ()}


@dataclass(kw_only=True)
class TurboQuant(FormatMethod):
    """TurboQuant as vLLM serves it: every token is packed by itself, except in the first and the last layers.

    Args:
        format: vLLM's preset: ``k8v4`` (keys are e4m3 numbers, not rotated), ``4bit_nc``, ``k3v4_nc`` or
            ``3bit_nc``.
        nc_at: where a token's levels are normalised (norm correction). ``read``: by every reader (vLLM). ``write``:
            once, in the stored norm, which differs in one rounding. ``none``: not at all (the paper).
        qjl: True for the paper's inner-product quantizer: one bit less for the levels, and one bit per channel for a
            sketch of the residual (:class:`~kvbench.quantizers.turboquant.SketchQuantizer`). Requires ``nc_at=none``.
        boundary: number of layers at either end of the model that stay in full precision, but at most half of the
            layers (vLLM: 2; none in models that also have layers without softmax attention).
        rotation: rotations of keys and of values.
        sinks: number of first tokens that stay in full precision (0 in vLLM).
        window: number of newest tokens that stay in full precision (0 in vLLM).
        own: ``stored``: the token of a decode step is packed before it attends (vLLM); ``exact``: it attends to its own
            key and value in full precision.
        seed: seed of a random rotation and of the sketch.
    """

    format: Literal["k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"] = "4bit_nc"
    nc_at: Literal["read", "write", "none"] = "read"
    qjl: bool = False
    boundary: int = bounded(2, minimum=0)
    rotation: TurboRotation = field(default_factory=TurboRotation)
    seed: int = 0
    #: True if the model also has layers without softmax attention, set when the model is known
    hybrid: bool = field(default=False, init=False, repr=False, compare=False)

    widths: ClassVar[tuple[str, ...]] = ("format",)

    # -- layers -----------------------------------------------------------------------------------------------------

    def boundaries(self, layers: int | None) -> int:
        """Return how many layers at either end of a model of `layers` layers stay in full precision."""
        return 0 if layers is None or self.hybrid else min(self.boundary, layers // 2)

    def packs_in(self, layer: int, layers: int | None) -> bool:
        """Return True if a layer of a model of `layers` layers packs tokens; False for the first and the last ones."""
        ends = self.boundaries(layers)
        return layers is None or ends <= layer < layers - ends

    def _packs(self, layer: KVLayer) -> bool:
        return self.packs_in(layer.index, layer.layers)

    def stored_as(self, layer: int, layers: int) -> int:
        """Return the index of the first of `layers` layers that is stored in the same formats as `layer`."""
        return self.boundaries(layers) if self.packs_in(layer, layers) and layers else 0

    # -- formats ----------------------------------------------------------------------------------------------------

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of a code of keys and of values."""
        return FORMATS[self.format]

    def formats(self) -> tuple[FormatSpec, FormatSpec]:
        """Return the packed formats of keys and of values, which have one group per token and head."""
        key, value = (
            StoredFormat(bits=bits, group_size="head_dim", axis="token", side=side)
            for bits, side in zip(self.bits, SIDES, strict=True)
        )
        return key, value

    def make_quantizer(self, side: Side, channels: int) -> AffineQuantizer:
        """Return the quantizer of the keys or the values; `channels` has no effect."""
        from kvbench.quantizers.engine.vllm import Fp8
        from kvbench.quantizers.turboquant import LevelQuantizer, SketchQuantizer, TruncatingQuantizer

        key, value = self.bits
        if side == "value":
            return TruncatingQuantizer(value)
        if key == 8:
            return Fp8()
        return SketchQuantizer(key, seed=self.seed) if self.qjl else LevelQuantizer(key, self.nc_at)

    def rotation_of_keys(self) -> str:
        """Return the name of the rotation of keys: ``random``, or one of :class:`RotationSpec`."""
        if self.rotation.key != OWN:
            return self.rotation.key
        return "none" if self.bits[0] == 8 else "hadamard"

    def transform(self, layer: KVLayer, side: Side) -> Transform | None:
        """Return the basis in which `layer` stores its keys or its values."""
        from kvbench.rotation import transform

        if not self._packs(layer):
            return None
        channels = layer.key_dim if side == "key" else layer.value_dim
        name = self.rotation_of_keys() if side == "key" else self.rotation.value
        if name == RANDOM:
            return random_rotation(channels, self.seed, str(layer.device))
        return transform(name, side, channels, layer.device, layer.index)

    def packed_bytes(self, at: Setting, count: int, form: FormatSpec) -> KVBytes:
        """Return the bytes of `count` packed tokens in a format, counting only their keys or only their values.

        In addition to codes, a key has a norm and, with a sketch, the length of the residual; a value has a scale and a
        minimum. All of these are fp16. vLLM also rounds the bytes of a token (key and value) up to an even number,
        which they are if the head is a multiple of 16 channels.
        """
        assert isinstance(form, StoredFormat)
        params = 2 if form.side == "value" else 0 if form.bits == 8 else 1 + self.qjl
        rows = at.heads * count
        return KVBytes(codes=-(-rows * at.channels * form.bits // 8), scales=rows * params * 2)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of one layer for one sequence; boundary layers are in full precision."""
        if not self.packs_in(at.layer, at.layers):
            return at.both(at.tokens - at.hidden)
        return super().layer_bytes(at)

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a hyper-parameter is out of range, or does not go with another one."""
        if self.format not in FORMATS:
            raise ConfigError("method.format", self.format, "is not a preset of vLLM", allowed=tuple(FORMATS))
        if self.nc_at not in ("read", "write", "none"):
            raise ConfigError("method.nc_at", self.nc_at, "no such place", allowed=("read", "write", "none"))
        if self.qjl and self.bits[0] == 8:
            raise CombinationError(
                "method.qjl",
                self.qjl,
                f"needs keys of 3 or 4 bits, not format={self.format}",
                hint="method.format=4bit_nc",
            )
        if self.qjl and self.nc_at != "none":
            raise CombinationError(
                "method.qjl",
                self.qjl,
                f"cannot be combined with method.nc_at={self.nc_at}: levels with a sketch are not normalised",
                hint="method.nc_at=none",
            )
        super().check(head_dim, max_length)

    def suit(self, numbers: Mapping[str, Any]) -> None:
        """Read from a model's ``config.json`` whether all layers have softmax attention."""
        self.hybrid = is_hybrid(numbers)


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Return True if some layers of a model have no softmax attention (Mamba, linear attention, convolutions)."""
    # Falcon-H1 has a state in every layer, and lists no types
    return config.get("model_type") == "falcon_h1" or any(kind not in ATTENTION for kind in layer_types(config) or ())


@cache
def random_rotation(channels: int, seed: int, device: str) -> Transform:
    """Return the transform by a random orthogonal matrix, which all layers on a device share."""
    import torch

    from kvbench.quantizers.turboquant import orthogonal
    from kvbench.rotation import Transform

    with torch.inference_mode(False):
        matrix = orthogonal(channels, seed).T.contiguous()
        return Transform(matrix, matrix).to(torch.device(device))
