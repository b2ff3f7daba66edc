"""transformers' QuantizedCache, which many papers call KIVI.

LogQuant's "KiVi" rows are this cache with quanto. It is not KIVI: the whole prompt is quantized at once, whatever the
residual length; keys are grouped per token (quanto's axis 0: 64 consecutive channels); and whenever the residual (the
newest tokens, in full precision) is full, all earlier tokens are dequantized and quantized again together with it. Here
transformers' own quantizers run within kvbench's attention, byte counts and decoding loop. After every step the stored
tokens are those of ``QuantizedCache`` (tests compare them). Like that cache, this method ignores sliding windows: it
holds every token, while fp16 and the other methods drop hidden tokens.

Three caches in LogQuant's repository are this one with other windows; W is their ``window_length``:

* KiViSink (its Table 1): ``sinks=2``;
* StreamingQuant, a window of W to 2 W - 1 tokens in full precision: ``sinks=4 recent=W residual=2W``;
* PartialStreaming, in which keys follow StreamingQuant and values transformers' rule: StreamingQuant's settings and
  ``value_residual=W``.

``backend=fp8`` is transformers' cache in 8-bit floating point (e4m3; transformers 5.23 or later). It has no residual:
each token is quantized as it arrives and attends to its own quantized form. One scale for all keys of a layer and one
for all values are taken from the prompt and kept. Here each row of a batch has its own two scales, so that a row does
not depend on the others.

Source: transformers, cache_utils.py, QuantizedLayer and Fp8QuantizedLayer; LogQuant (Chen et al. 2025), sec. 4.1 and
Table 1; Concyclics/LogQuantKV, src/LogQuant.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import ConfigError, ModelError
from kvbench.methods.base import SIDES, Method, Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.quantizers.spec import fitting
from kvbench.util.requirements import Package
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import BaseQuantizedLayer

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment

#: bit widths and axes of each backend with groups
BACKENDS = {"quanto": ((2, 4), (0, -1)), "hqq": ((1, 2, 3, 4, 8), (0, 1))}
#: options that only backends with groups have
GROUPED = ("bits", "residual", "recent", "value_residual", "group_size", "axis_key", "axis_value")


@dataclass(kw_only=True)
class HFQuantized(Method):
    """The QuantizedCache of transformers: the newest tokens wait in full precision until there are enough to quantize.

    These tokens are the residual.

    Args:
        backend: what quantizes: ``quanto`` (used in the LogQuant paper) or ``hqq``; ``fp8`` has no other options than
            `sinks`.
        bits: bits per code: 2 or 4 for quanto; 1, 2, 3, 4 or 8 for hqq.
        residual: number of tokens at which the residual is full.
        recent: number of newest tokens that stay in full precision when the others are quantized, also at the end of
            the prompt. Transformers has none (0).
        value_residual: number of tokens at which the residual of the values is full, if it differs from that of the
            keys; no recent values then stay in full precision. None: `residual` and `recent` apply to values too.
        group_size: elements per group.
        axis_key: axis along which the backend groups keys: 0 or -1 for quanto, 0 or 1 for hqq.
        axis_value: axis along which the backend groups values.
        sinks: number of first tokens that stay in full precision (LogQuant's Table 1; transformers has none).
    """

    backend: Literal["quanto", "hqq", "fp8"] = "quanto"
    bits: int = 2
    residual: int = bounded(128, minimum=1)
    recent: int = bounded(0, minimum=0)
    value_residual: int | None = bounded(None, minimum=1)
    group_size: int = bounded(64, minimum=1)
    axis_key: int = 0
    axis_value: int = 0
    sinks: int = bounded(0, minimum=0)

    widths: ClassVar[tuple[str, ...]] = ("backend", "bits")

    @property
    def by_token(self) -> bool:  # type: ignore[override]
        """True for ``backend=fp8``: a token's stored form does not depend on later tokens."""
        return self.backend == "fp8"

    @property
    def eager(self) -> bool:
        """True for ``backend=fp8``: a step quantizes its new tokens before any token attends to them."""
        return self.backend == "fp8"

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if the backend does not support an option, or if a number of tokens is out of range."""
        super().check(head_dim, max_length)
        if self.backend == "fp8":
            defaults = {entry.name: entry.default for entry in fields(self)}
            for name in GROUPED:
                if getattr(self, name) != defaults[name]:
                    raise ConfigError(
                        f"method.{name}",
                        getattr(self, name),
                        "has no effect with method.backend=fp8",
                        hint="leave it out",
                    )
            return
        widths, axes = BACKENDS[self.backend]
        if self.bits not in widths:
            raise ConfigError(
                "method.bits", self.bits, f"{self.backend} does not support this number of bits", allowed=widths
            )
        for name in ("axis_key", "axis_value"):
            if getattr(self, name) not in axes:
                raise ConfigError(
                    f"method.{name}", getattr(self, name), f"{self.backend} does not support this axis", allowed=axes
                )
            if self.backend == "hqq" and self.bits == 3 and getattr(self, name) == 1:
                raise ConfigError(
                    f"method.{name}",
                    1,
                    "hqq 0.2 cannot unpack 3-bit codes of a 4-D tensor along this axis",
                    allowed=[0],
                )
        if self.recent >= self.residual:
            raise ConfigError(
                "method.recent",
                self.recent,
                f"must be smaller than method.residual={self.residual}, so that tokens are left to quantize",
                allowed=f"0 to {self.residual - 1}",
            )
        # only quanto's other axis has its groups along the tokens
        inside = self.backend == "hqq" or 0 in (self.axis_key, self.axis_value)
        if head_dim and inside and head_dim % self.group_size:
            raise ConfigError(
                "method.group_size",
                self.group_size,
                f"does not divide the model's head_dim {head_dim}",
                hint=f"method.group_size={fitting(64, head_dim) or head_dim}",
            )

    def packages(self) -> tuple[Package, ...]:
        """Return the optional package that the backend needs; none for fp8."""
        if self.backend == "fp8":
            return ()
        module = {"quanto": "optimum.quanto", "hqq": "hqq"}[self.backend]
        return (Package(module, "method.backend", self.backend, "run pip install 'kvbench[hf]'"),)

    def reach(self) -> Reach | None:
        """Return the largest number of tokens that are all kept exactly: `sinks` plus `recent`; None if both are 0."""
        exact = self.sinks + self.recent
        key = "recent" if self.recent else "sinks"
        return Reach(f"method.{key}", getattr(self, key), exact) if exact else None

    def check_reach(self, max_length: int) -> None:
        """Raise ConfigError if the residual cannot become full, so that no generated token would be quantized."""
        for key in ("residual", "value_residual"):
            count = getattr(self, key)
            if count is not None and count >= max_length and self.backend != "fp8":
                raise ConfigError(
                    f"method.{key}",
                    count,
                    f"is so large that no generated token would be packed (model.max_length={max_length})",
                    allowed=f"at most {max_length - 1}",
                )
        super().check_reach(max_length)

    def backend_layer(self) -> BaseQuantizedLayer:
        """Return a new cache layer of transformers; ModelError if its package is missing or transformers too old."""
        if self.backend == "fp8":
            try:
                from transformers.cache_utils import Fp8QuantizedLayer
            except ImportError as error:
                raise ModelError(
                    "method.backend=fp8 needs transformers 5.23 or later.\n  hint: run pip install 'transformers>=5.23'"
                ) from error
            return Fp8QuantizedLayer()
        from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

        try:
            layer_class = {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer}[self.backend]
            return layer_class(self.bits, self.axis_key, self.axis_value, self.group_size, self.residual)
        except ImportError as error:
            raise ModelError(
                f"method.backend={self.backend} needs a package that is not installed.\n"
                "  hint: run pip install 'kvbench[hf]' (quanto compiles its kernels on first use and "
                "needs a C++ compiler)"
            ) from error

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return empty segments for the sinks (if there are any), the quantized tokens, and the residual."""
        from kvbench.cache.segments.foreign import Fp8Segment, HFSegment

        backend = self.backend_layer()
        backend.dtype, backend.device = layer.dtype, layer.device
        backend.keys = backend.values = layer.new_empty()  # hqq takes dtype and device from them
        axis = self.axis_key if side == "key" else self.axis_value
        packed = (Fp8Segment if self.backend == "fp8" else HFSegment)(
            layer.batch,
            layer.heads,
            layer.key_dim if side == "key" else layer.value_dim,
            layer.dtype,
            layer.device,
            backend=backend,
            axis=axis,
            multiple=8 if self.backend == "hqq" and axis == 1 else 1,
        )
        tail = self.full(layer, side, capacity=self.window(side)[0] + 64)
        return [self.full(layer, side, capacity=self.sinks), packed, tail] if self.sinks else [packed, tail]

    def window(self, side: Side) -> tuple[int, int]:
        """Return at how many tokens the residual of the keys or the values is full, and how many then stay in it."""
        if self.backend == "fp8":
            return 1, 0
        if side == "value" and self.value_residual is not None:
            return self.value_residual, 0
        return self.residual, self.recent

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the prompt: quantize all of its tokens, except for the sinks and the newest `recent` tokens."""
        for side, store, x in zip(SIDES, layer.stores(), (keys, values), strict=True):
            sinks = min(self.sinks, x.shape[2])
            border = max(sinks, x.shape[2] - self.window(side)[1])
            if self.sinks:
                store.segments[0].append(rows, x[:, :, :sinks])
            store.segments[-2].append(rows, x[:, :, sinks:border])
            store.tail.append(rows, x[:, :, border:])

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """If the residual is full, quantize all tokens again, except for the sinks and the newest `recent` tokens."""
        for side, store in zip(SIDES, layer.stores(), strict=True):
            if self.sinks:
                store.fill_sinks(rows, self.sinks, layer.real_tokens(rows.indices(layer.batch)[0]))
            residual, recent = self.window(side)
            excess = store.tail.length(rows) - recent
            if store.tail.length(rows) >= residual:
                store.segments[-2].append(rows, store.tail.view(rows)[:, :, :excess])
                store.tail.drop_front(rows, excess)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of the sinks, of the residual, and of the tokens that the backend packs."""
        total = KVBytes()
        for side, axis in zip(SIDES, (self.axis_key, self.axis_value), strict=True):
            residual, recent = self.window(side)
            sinks, begun = min(self.sinks, at.tokens), min(self.sinks, at.prompt)
            tail = min(at.prompt - begun, recent) + at.tokens - sinks - (at.prompt - begun)
            if tail >= residual:  # quantized but for `recent`, whenever it is full
                tail = recent + (tail - residual) % (residual - recent)
            total += at.exact(sinks + tail) + self.backend_bytes(axis, at.tokens - sinks - tail, at)
        return total

    def backend_bytes(self, axis: int, count: int, at: Setting) -> KVBytes:
        """Predict the bytes of tokens as the backend packs them, counting only their keys or only their values.

        fp8 has one byte per element and one fp32 scale. The libraries arrange the elements in a matrix of groups, and
        pack codes of several rows into one byte (hqq with 3 bits: ten codes into 4 bytes).
        """
        if not count:
            return KVBytes()
        if self.backend == "fp8":
            return KVBytes(codes=at.heads * count * at.channels, scales=4)
        if self.backend == "hqq" and axis == 1:
            count = -(-count // 8) * 8
        groups = at.heads * count * at.channels // self.group_size
        # axis 0 of quanto, axis 1 of hqq: a row is a group; else a column is
        by_row = axis == (0 if self.backend == "quanto" else 1)
        rows, columns = (groups, self.group_size) if by_row else (self.group_size, groups)
        if self.bits == 3:
            codes = -(-rows // 10) * 4 * columns
        else:
            codes = -(-rows * self.bits // 8) * columns
        return KVBytes(codes=codes, scales=2 * groups * at.width)
