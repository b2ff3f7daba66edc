"""KVQuant: keys before RoPE per channel, values per token, non-uniform levels, outliers in full precision.

Source: Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization" (NeurIPS
2024), sec. 3, and SqueezeAILab/KVQuant (quant/ and deployment/). The thresholds of the keys and the codebooks come from
a calibration file (``python -m kvbench.calibrate``). There is no window in full precision: every token is packed as it
arrives, and a step attends to its own tokens in packed form, as in both directories of the authors' code. With their
kernels, prompt tokens attend to each other in full precision (``prefill=exact``). Their accuracy figures come from a
simulation in which every token attends to quantized ones (``prefill=quantized``). Their kernels store an outlier in 8
bytes, in a fixed array of 42 per token; here an outlier takes 4 bytes in 16-bit models, and only outliers that occur
are stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.cache.policy import CacheState
from kvbench.errors import ConfigError
from kvbench.methods.base import Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.leaving import CHUNK, outlier_block, whole_groups
from kvbench.methods.recency import RecencyMethod
from kvbench.util.attachment import placement
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.calibration.file import Calibration
    from kvbench.models.spec import ModelConfig
    from kvbench.parallel.team import Team


@dataclass
class Calibrated(CacheState):
    """KVQuant's per-cache state: its calibration file, and the processes that divide the heads.

    Args:
        path: calibration file with thresholds and codebooks; None: the file that the hyper-parameter `calibration`
            names.
        team: under tensor parallelism, the processes among which the heads are divided. None: this process has all
            heads.
    """

    path: Path | None
    team: Team | None = None


@dataclass(kw_only=True)
class KVQuant(RecencyMethod):
    """KVQuant: every token is quantized to non-uniform levels; outliers are stored in full precision in addition.

    Keys are stored before RoPE. Levels, and the thresholds beyond which a key is an outlier, come from a calibration
    file.

    Args:
        bits: bits per code: 2, 3 or 4 (nuq2, nuq3, nuq4 in the paper).
        outliers: share of the elements that are outliers (paper: 0.01); 0: none.
        first_tokens: number of first tokens (attention sinks) that stay in full precision (the authors'
            ``first_few_fp16``).
        cap_outliers: True: store at most a fixed number of outliers among a token's keys, about `outliers` times its
            number of elements: half of them above the upper thresholds, half below the lower ones. Further outliers are
            clipped, as in the authors' kernels.
        q_norm: True: rescale the dequantized levels so that mean and standard deviation are preserved (the paper, for 2
            bits).
        prefill: ``exact``: prompt tokens attend to full-precision keys and values (the authors' kernels);
            ``quantized``: they attend to quantized ones (their accuracy figures).
        calibration: path of a file made by ``python -m kvbench.calibrate``, or of a folder of such files. None: search
            the folder ``calibration`` among the model's files (the test model ``tiny`` has one), then
            results/calibration.
    """

    bits: int = bounded(4, minimum=2, maximum=4)
    outliers: float = bounded(0.01, minimum=0.0, maximum=0.5)
    first_tokens: int = bounded(0, minimum=0)
    cap_outliers: bool = False
    q_norm: bool = False
    prefill: Literal["exact", "quantized"] = "exact"
    calibration: str | None = None
    #: calibration file for the model, set by :meth:`prepare`
    calibration_file: Path | None = field(default=None, init=False, repr=False, compare=False)

    needs_quantizer: ClassVar[bool] = False
    widths: ClassVar[tuple[str, ...]] = ("bits",)
    by_token: ClassVar[bool] = True

    def exact(self, n: int) -> int:
        """Return 0: apart from the sinks, every token is packed as it arrives."""
        return 0

    @property
    def sinks(self) -> int:  # type: ignore[override]
        """Number of tokens at the start of a sequence that stay in full precision: `first_tokens`."""
        return self.first_tokens

    @property
    def keys_before_rope(self) -> bool:
        """True: the cache holds pre-RoPE keys."""
        return True

    @property
    def quantized_prefill(self) -> bool:
        """True for ``prefill=quantized``: prompt tokens attend to quantized keys and values."""
        return self.prefill == "quantized"

    @property
    def eager(self) -> bool:
        """True: a decode step packs its tokens before it computes attention."""
        return True

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a hyper-parameter is out of range, or if `calibration` is a path that does not exist."""
        super().check(head_dim, max_length)
        if self.cap_outliers and not self.outliers:
            raise ConfigError("method.cap_outliers", True, "has no effect without outliers (method.outliers=0)")
        if self.calibration is not None and not Path(self.calibration).expanduser().exists():
            raise ConfigError(
                "method.calibration",
                self.calibration,
                "does not exist",
                hint=f"python -m kvbench.calibrate --model MODEL --text FILE --bits {self.bits} "
                f"--outliers {self.outliers!r} --out {self.calibration}",
            )

    def reach(self) -> Reach | None:
        """Return the largest number of tokens that all stay in full precision: `first_tokens`; None if it is 0."""
        return Reach("method.first_tokens", self.first_tokens, self.first_tokens) if self.first_tokens else None

    # -- the calibration file ---------------------------------------------------------------------------------------

    def prepare(self, model: ModelConfig) -> None:
        """Find the calibration file of a model by the model's name, which is possible before its weights are loaded.

        Raises:
            ConfigError: there is no calibration file for this model with the right bits and share of outliers. The
                message shows the command that makes one.
        """
        names = {model.calibrated_as, None if model.random else model.preset}
        file = self._find(lambda known: known.info["model"] in names, model.folder(), model.calibrated_as)
        self.calibration_file = file.path

    def identity(self) -> dict[str, Any]:
        """Return ``{"calibration": HASH}`` with a hash of the file's content; before :meth:`prepare` it is empty."""
        if self.calibration_file is None:
            return {}
        return {"calibration": hashlib.sha256(self.calibration_file.read_bytes()).hexdigest()[:16]}

    def _find(self, fits: Any, beside: Path | None, name: str, weights: str = "") -> Calibration:
        """Return the first calibration with this method's bits and share of outliers for which ``fits(file)`` is True.

        A file that `calibration` names is returned whatever `fits` says.

        Args:
            fits: returns True for a calibration file that belongs to the model.
            beside: folder of the model's weights, whose subfolder ``calibration`` is searched; None: unknown.
            weights: words for the model in messages if it is identified by its weights; empty: messages say `name`.
        """
        from kvbench.calibration.file import FOLDER, KEY, calibrations_in, command, load_calibration
        from kvbench.calibration.stored import RANDOM, unfit

        named = None if self.calibration is None else Path(self.calibration).expanduser()
        if named is not None and named.is_file():
            file = load_calibration(named)
            file.check_format(self.bits, self.outliers)
            return file
        folders = [named] if named is not None else [*([beside / "calibration"] if beside is not None else []), FOLDER]
        others, strangers = [], []
        for file in calibrations_in(folders):
            if not fits(file):
                strangers.append(file)
                continue
            if self.bits in file.bits and abs(file.outliers - self.outliers) < 1e-9:
                return file
            others.append(f"{file.path} ({file.info['bits']} bits, {100 * file.outliers:g}% outliers)")
        there = f"; the existing ones are {', '.join(others)}" if others else unfit(strangers)
        raise ConfigError(
            KEY,
            self.calibration,
            f"kvquant needs a calibration (thresholds and codebooks), but there is none for {weights or name}"
            f" with {self.bits} bits and {100 * self.outliers:g}% outliers in {' or '.join(map(str, folders))}{there}",
            hint=command(name, self.bits, self.outliers) + (RANDOM if weights else ""),
        )

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """Check that the calibration was made with this model, and return an empty cache.

        Raises:
            ConfigError: there is no calibration file, the file was made with another model, or `cap_outliers` is set
                under tensor parallelism.
            ModelError: kvbench cannot obtain this model's keys before RoPE.
        """
        from kvbench.calibration.file import load_calibration, probe

        if self.calibration_file is not None:
            file = load_calibration(self.calibration_file)
        else:
            numbers, where = probe(model), Path(model.config._name_or_path or "MODEL")
            beside, weights = where if where.is_dir() else None, f"the weights of this model ({where.name})"
            file = self._find(lambda f: f.matches(numbers), beside, where.name, weights)
        file.check_model(model)
        team = placement(model).team
        if team is not None and self.cap_outliers:
            raise ConfigError(
                "method.cap_outliers",
                True,
                "counts a token's outliers over all heads, but with tensor parallelism each process "
                "has only some heads",
                hint="set method.cap_outliers=false, or replace runtime.tensor_parallel by runtime.device_map=auto",
            )
        cache = super().new_cache(model, prompts, max_length)
        cache.progress.method_state = Calibrated(file.path, team)
        return cache

    # -- storage ----------------------------------------------------------------------------------------------------

    def packed_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty segment for codes and outliers, with the levels that were calibrated for `layer`."""
        from kvbench.cache.segments.codebook import NuqFormat, NuqSegment
        from kvbench.calibration.file import load_calibration

        state = layer.progress.method_state
        if not isinstance(state, Calibrated):
            state = Calibrated(None)
        path = state.path or Path(str(self.calibration)).expanduser()
        file, width, team = load_calibration(path), layer.heads * layer.key_dim, state.team
        levels = file.levels(layer.index, side, self.bits)
        scale, offset = file.norm(layer.index, side, self.bits)
        form = NuqFormat(
            bits=self.bits,
            levels=levels,
            outliers=self.outliers,
            thresholds=file.thresholds(layer.index) if side == "key" else None,
            restored=levels * scale + offset if self.q_norm else None,
            most=int(self.outliers / 2 * width) + 1 if self.cap_outliers and side == "key" else None,
            heads=(team.rank * layer.heads, layer.heads) if team else None,
            gather=team.gather if team else None,
        )
        return NuqSegment(
            layer.batch,
            layer.heads,
            layer.key_dim if side == "key" else layer.value_dim,
            layer.dtype,
            layer.device,
            form=form,
            side=side,
            capacity=max(layer.expected_length() - self.sinks, 0),
        )

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty full-precision segment with room for the token of one decode step."""
        return self.full(layer, side, capacity=1, slack=0)

    def unit(self, width: int) -> int:
        """Return how many hidden tokens are dropped together: whole blocks of outliers, at least 32 tokens."""
        return max(CHUNK, outlier_block(width)) if self.outliers else CHUNK

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of sinks, codes, codebooks, thresholds and outliers, whose share is as in calibration."""
        wide = at.heads * at.channels
        here = at.tokens - whole_groups(at.hidden, self.unit(wide), self.first_tokens)
        first = min(self.first_tokens, at.tokens) if here == at.tokens else 0
        n, tables = here - first, 4 * 2**self.bits * (2 if self.q_norm else 1)
        codes = -(-n * wide * self.bits // 8)
        # thresholds are fp16 in every model; a value's range and offset are of a token, not of a head
        total = at.both(first) + KVBytes(2 * codes, 2 * tables + 2 * 2 * wide + 2 * n * at.param)
        if not self.outliers:
            return total
        # a token's values outside two quantiles, which are interpolated between order statistics
        values = 2 * (int((wide - 1) * self.outliers / 2 + 1e-9) + 1)
        entries = n * values + round(n * wide * self.outliers)
        return total + KVBytes(window=entries * at.width, index=entries * 2)
