"""OSCAR: 2-bit keys and values in a calibrated basis, clipped, between exact first and newest tokens.

Source: Together AI, "OSCAR" (arXiv 2605.17757), and FutureMLS-Lab/OSCAR with its serving kernel for SGLang. The
rotations come from ``python -m kvbench.calibrate method=oscar``. They are multiplied in fp32 here, in bf16 by the
authors. The first 64 and the newest 256 tokens stay in full precision; every other token is packed when it leaves the
window, with one scale per head, side and token.

The paper's 2.28 bits per element are for 128k tokens: 2 bits of codes, two 16-bit parameters per 128 channels, and 320
exact tokens. With fp32 parameters, as in the authors' runs, there would be 2.53.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvbench.cache.policy import CacheState
from kvbench.errors import ConfigError
from kvbench.methods.base import SIDES, Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.recency import RecencyMethod
from kvbench.quantizers.spec import FormatSpec
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.calibration.rotations import Rotations
    from kvbench.models.spec import ModelConfig
    from kvbench.quantizers.affine import AffineQuantizer
    from kvbench.rotation import Transform

#: bytes of a stored scale; None: those of the model's parameters (2 in 16-bit models)
WIDTHS = {"fp16": None, "bf16": 2, "fp32": 4}


@dataclass
class Rotated(CacheState):
    """OSCAR's per-cache state: its calibration file."""

    path: Path


@dataclass(kw_only=True)
class Oscar(RecencyMethod):
    """OSCAR: keys and values are rotated by calibrated matrices, clipped and packed in 2 bits, token by token.

    Keys are stored after RoPE and rotation.

    Args:
        sinks: number of first tokens that stay in full precision (paper: 64).
        window: number of newest tokens that stay in full precision (paper: 256).
        clip_key: share of a key's channels that are below the clipping threshold in absolute value; the others are
            clipped to it (paper: 0.96). 1: no clipping.
        clip_value: the same for values (paper: 0.92).
        levels: how codes follow from a clipped token. ``uniform``: by its range (the paper); ``lloyd_max``: by its mean
            and standard deviation, with the edges of the optimal 2-bit quantizer for a Gaussian (an option of the
            authors' code).
        scales: what is stored for each token, head and side. ``fp16``: scale and minimum, which the fused kernels read;
            ``fp32`` or ``bf16``: scale and zero point, as the authors store them, which no fused kernel reads.
        basis: basis in which tokens are stored. ``calibrated``: that of the calibration file; ``rotation``: that of
            `rotation`, which needs no file. With ``rotation``, a Hadamard rotation and no clipping, the method is
            QuaRot's 2-bit cache.
        calibration: path of a file made by ``python -m kvbench.calibrate method=oscar``, or of a folder of such files.
            None: search the folder ``calibration`` among the model's files (the test model ``tiny`` has one), then
            results/calibration.
    """

    sinks: int = bounded(64, minimum=0)
    window: int = bounded(256, minimum=0)
    clip_key: float = bounded(0.96, above=0.0, maximum=1.0)
    clip_value: float = bounded(0.92, above=0.0, maximum=1.0)
    levels: Literal["uniform", "lloyd_max"] = "uniform"
    scales: Literal["fp16", "bf16", "fp32"] = "fp16"
    basis: Literal["calibrated", "rotation"] = "calibrated"
    calibration: str | None = None
    #: calibration file for the model, set by :meth:`prepare`
    calibration_file: Path | None = field(default=None, init=False, repr=False, compare=False)

    def exact(self, n: int) -> int:
        """Return how many of the newest tokens are in full precision: the window."""
        return min(n, self.window)

    def reach(self) -> Reach | None:
        """Return the largest number of tokens that are all kept exactly: `sinks` + `window`; None if both are 0."""
        if self.window:
            return Reach("method.window", self.window, self.sinks + self.window)
        return Reach("method.sinks", self.sinks, self.sinks) if self.sinks else None

    def transform(self, layer: KVLayer, side: Side) -> Transform | None:
        """Return the basis of a layer's keys or values: the calibrated one, or with ``basis=rotation`` `rotation`."""
        if self.basis == "rotation":
            return super().transform(layer, side)
        from kvbench.rotation import transform

        state = layer.progress.method_state
        path = state.path if isinstance(state, Rotated) else Path(str(self.calibration)).expanduser()
        channels = layer.key_dim if side == "key" else layer.value_dim
        return transform(str(path), side, channels, layer.device, layer.index)

    # -- storage ----------------------------------------------------------------------------------------------------

    def make_quantizer(self, side: Side, channels: int) -> AffineQuantizer:
        """Return OSCAR's quantizer, with one group per token and head, whatever the number of channels."""
        from kvbench.quantizers.oscar import OscarQuantizer

        bits, clip = self.formats()[SIDES.index(side)].bits, self.clip_key if side == "key" else self.clip_value
        return OscarQuantizer(bits, clip, lloyd_max=self.levels == "lloyd_max", scales=self.scales)

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty full-precision segment for the window, with room for 16 tokens beyond it."""
        if not self._packs(layer):
            return super().exact_segment(layer, side)
        return self.full(layer, side, capacity=self.window + 16, slack=16)

    def packed_bytes(self, at: Setting, count: int, form: FormatSpec) -> KVBytes:
        """Return the bytes of `count` packed tokens, counting only keys or only values; a head has two parameters."""
        codes = -(-at.heads * count * at.channels * form.bits // 8)
        return KVBytes(codes=codes, scales=2 * at.heads * count * (WIDTHS[self.scales] or at.param))

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a hyper-parameter is out of range, or does not fit the others or the model's heads."""
        if self.levels == "lloyd_max" and any(form.bits != 2 for form in self.formats()):
            raise ConfigError(
                "method.levels",
                self.levels,
                "cuts codes at the edges of a 2-bit quantizer",
                hint="quantizer=int2_token, or method.levels=uniform",
            )
        self._check_basis(head_dim)
        super().check(head_dim, max_length)

    def _check_basis(self, head_dim: int | None) -> None:
        """Raise ConfigError if `basis`, `rotation`, `calibration` and the size of the heads do not fit together."""
        if self.basis == "rotation":
            if self.calibration is not None:
                raise ConfigError(
                    "method.calibration",
                    self.calibration,
                    "is not read with method.basis=rotation",
                    hint="leave it out",
                )
            return
        if not self.rotation.plain:
            side: Side = "key" if self.rotation.key != "none" else "value"
            raise ConfigError(
                f"method.rotation.{side}",
                self.rotation.of(side),
                "has no effect, because the basis is that of the calibration file",
                hint="method.basis=rotation",
            )
        if head_dim:
            from kvbench.calibration.heads import check_head

            check_head(head_dim)
        if self.calibration is not None and not Path(self.calibration).expanduser().exists():
            raise ConfigError(
                "method.calibration",
                self.calibration,
                "does not exist",
                hint=f"python -m kvbench.calibrate method=oscar --model MODEL --text FILE --out {self.calibration}",
            )

    def check_rule(self) -> None:
        """Raise ConfigError if a group is not one head of one token, or if :meth:`RecencyMethod.check_rule` fails."""
        for side, spec in zip(SIDES, self.formats(), strict=True):
            if spec.axis != "token" or spec.group_size != "head_dim" or spec.kind != "affine":
                raise ConfigError(
                    f"quantizer.{side}",
                    f"axis={spec.axis} group_size={spec.group_size}",
                    "OSCAR has one group per token and head",
                    hint="quantizer=int2_token",
                )
        super().check_rule()

    # -- the calibration file ---------------------------------------------------------------------------------------

    def prepare(self, model: ModelConfig) -> None:
        """Find the calibration file of a model by the model's name, which is possible before its weights are loaded.

        Raises:
            ConfigError: there is no calibration file for this model. The message shows the command that makes one.
        """
        if self.basis == "calibrated":
            names = {model.calibrated_as, None if model.random else model.preset}
            file = self._find(lambda file: file.info["model"] in names, model.folder(), model.calibrated_as)
            self.calibration_file = file.path

    def identity(self) -> dict[str, Any]:
        """Return the base class's entries and, after :meth:`prepare`, ``calibration``: a hash of the file's content."""
        if self.calibration_file is None:
            return super().identity()
        digest = hashlib.sha256(self.calibration_file.read_bytes()).hexdigest()[:16]
        return {**super().identity(), "calibration": digest}

    def _find(self, fits: Callable[[Rotations], bool], beside: Path | None, name: str, weights: str = "") -> Rotations:
        from kvbench.calibration.rotations import Rotations, find_rotations
        from kvbench.calibration.stored import RANDOM

        named = None if self.calibration is None else Path(self.calibration).expanduser()
        command = Rotations.command(name) + (RANDOM if weights else "")
        return find_rotations(named, fits, beside, weights or name, command)

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """Check that the calibration was made with this model, and return an empty cache.

        Raises:
            ConfigError: there is no calibration file, or it was made with another model; or the heads do not fit.
        """
        if self.basis == "rotation":
            return super().new_cache(model, prompts, max_length)
        from kvbench.calibration.rotations import Rotations
        from kvbench.calibration.stored import load_stored, probe
        from kvbench.models.projections import head_dim

        self.check(head_dim(model))  # before a calibration is asked for, which would refuse the model
        if self.calibration_file is not None:
            file = load_stored(self.calibration_file, Rotations)
        else:
            numbers, where = probe(model), Path(model.config._name_or_path or "MODEL")
            beside, weights = where if where.is_dir() else None, f"the weights of this model ({where.name})"
            file = self._find(lambda f: f.matches(numbers), beside, where.name, weights)
        file.check_model(model)
        assert file.path is not None
        cache = super().new_cache(model, prompts, max_length)
        cache.progress.method_state = Rotated(file.path)
        return cache
