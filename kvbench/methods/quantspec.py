"""QuantSpec: two nibbles behind a double full-precision buffer, decoded by speculation on the upper nibbles.

Source: Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache" (2025), sec. 4.2, 4.3
and Algorithm 1; the state after the prompt is that of the first author's code (rishabh-16/QuantSpec,
Engine/backend_quantspec.py), which has no flush while decoding. The loop is :mod:`kvbench.decoding.speculative`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.errors import CombinationError, ConfigError
from kvbench.methods.base import Method, Reach, Side, affine
from kvbench.methods.sliding import whole
from kvbench.methods.speculation import OWN_VIEWS, Speculation, Weights
from kvbench.util.requirements import Package
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.models.spec import ModelConfig


#: the sparse drafts as the paper has them (sec. 5.1): a quarter of the context, and what MagicDec's code sets
SPARSE: dict[str, dict[str, Any]] = {
    "streamingllm": {"budget": 0.25, "sinks": 16},
    "snapkv": {"budget": 0.25, "kernel": 5, "pooling": "avg", "group": "sum", "group_after_pooling": True},
    "h2o": {"budget": 0.25},
}


@dataclass(kw_only=True)
class QuantSpec(Method):
    """QuantSpec over keys after RoPE; G is the group of its keys (``quantizer.key.group_size``).

    The newest G to 2 G - 1 tokens are exact once the prompt has reached G. Whenever 2 G or more are exact and
    confirmed, the oldest G are quantized, once and as one group of keys; a round of speculation adds up to gamma + 1
    tokens to the buffer. On a layer with a sliding window the rule is that of the whole text, and what is hidden is
    dropped G at a time; a window of up to G + 1 tokens shows no packed one, and its layer is held as fp16 holds it.

    Args:
        gamma: tokens drafted a round; 0: no speculation, the target alone (paper: 1 to 6, by search).
        draft: ``upper`` (QuantSpec); ``full``: the target's own codes, for the weights' share alone (Fig. 5); or the
            name of any other method, which gets a cache of its own and the same prompt: ``streamingllm``, ``snapkv``
            (the paper's baselines), ``kivi``, ``logquant``, ...
        draft_options: hyper-parameters of that method, and ``quantizer``: the preset of its formats. Sparse drafts have
            a quarter of the context and MagicDec's settings (:data:`SPARSE`) unless said otherwise.
        draft_weights: ``same``; ``int4``: the feed-forward layers in 4 bits for the draft; ``int4_all``: every linear
            layer of the decoder.
        target: ``int8``: both nibbles (QuantSpec); ``fp16``: nothing is packed, as the sparse baselines verify.
        sensitive_layers: L_S, first layers whose keys and values stay exact for target and draft; fewer than the
            model has.
    """

    rolls: ClassVar[bool] = True
    needs_quantizer: ClassVar[bool] = True
    gamma: int = bounded(4, minimum=0, maximum=64)
    draft: str = "upper"
    draft_options: Any = None
    draft_weights: Weights = "same"
    target: Literal["int8", "fp16"] = "int8"
    sensitive_layers: int = bounded(0, minimum=0)

    @property
    def G(self) -> int:
        """Tokens of a group of keys, and of each half of the buffer."""
        assert self.quantizer is not None
        return int(self.quantizer.key.group_size)

    @property
    def speculation(self) -> Speculation | None:
        """How it is decoded; None where ``gamma=0``."""
        return Speculation(gamma=self.gamma, draft=self.draft, weights=self.draft_weights) if self.gamma else None

    def alone(self) -> QuantSpec:
        """The target's stores, no draft."""
        return replace(self, gamma=0)

    @property
    def needs_prompts(self) -> bool:  # type: ignore[override]
        """Whether the draft looks at the prompts beforehand (Cocktail)."""
        return self.own_cache and self.draft_method().needs_prompts

    @property
    def own_cache(self) -> bool:
        """Whether the draft has a cache of its own."""
        return bool(self.gamma) and self.draft not in OWN_VIEWS

    def draft_method(self) -> Method:
        """The method of the draft's own cache; the one that :meth:`prepare` has told the model, where it was called."""
        told: Method | None = self.__dict__.get("told")
        if told is not None:
            return told
        from kvbench.methods.load import load_method

        options = {**SPARSE.get(self.draft, {}), **(self.draft_options or {})}
        with _named_for_the_draft():
            return load_method(self.draft, **options)

    def packages(self) -> tuple[Package, ...]:
        """The draft's, where it has a cache of its own."""
        return self.draft_method().packages() if self.own_cache else ()

    def reach(self) -> Reach | None:
        """Up to 2 G - 1 tokens are exact; with ``target=fp16`` all are meant to be."""
        if self.target == "fp16":
            return None
        return Reach("quantizer.key.group_size", self.G, 2 * self.G - 1)

    def ready(self) -> None:
        """What the draft needs beside the model (an encoder) is here, or can be fetched."""
        if self.own_cache:
            with _named_for_the_draft():
                self.draft_method().ready()

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Keys per channel in two nibbles, a draft that exists and differs from its target, gamma below G."""
        super().check(head_dim, max_length)
        assert self.quantizer is not None
        for side, form in (("key", self.quantizer.key), ("value", self.quantizer.value)):
            if form.kind != "hierarchical":
                raise ConfigError(
                    f"quantizer.{side}.kind", form.kind, "quantspec stores two nibbles", allowed="hierarchical"
                )
        if self.quantizer.key.axis != "channel" or self.quantizer.value.axis != "token":
            raise ConfigError(
                "quantizer", self.quantizer.name, "quantspec groups keys per channel and values per token (sec. 4.2)"
            )
        if self.gamma >= self.G:
            raise ConfigError(
                "method.gamma",
                self.gamma,
                f"must be below the buffer's half, quantizer.key.group_size={self.G}",
                allowed=f"0 to {self.G - 1}",
            )
        self._check_draft(head_dim, max_length)

    def _check_draft(self, head_dim: int | None, max_length: int | None) -> None:
        if not isinstance(self.draft_options, Mapping | None):
            raise ConfigError(
                "method.draft_options",
                self.draft_options,
                "must be a group of keys",
                hint="method.draft_options={residual:64}",
            )
        if self.draft not in OWN_VIEWS:  # with gamma=0 too: a misspelt name is none
            if self.draft == "quantspec":
                raise ConfigError("method.draft", self.draft, "cannot draft for itself", hint="method.draft=upper")
            draft = self.draft_method()
            with _named_for_the_draft():
                draft.check(head_dim, max_length)
            return
        if self.draft_options:
            raise ConfigError(
                "method.draft_options",
                dict(self.draft_options),
                f"has no effect with method.draft={self.draft}",
                hint="name a method: method.draft=kivi",
            )
        if not self.gamma:
            return  # how draft and target differ is of no account
        if self.draft == "upper" and self.target == "fp16":
            raise ConfigError(
                "method.target", "fp16", "has no nibbles for method.draft=upper", hint="method.target=int8"
            )
        if self.draft == "full" and self.draft_weights == "same":
            raise ConfigError(
                "method.draft", "full", "is the target itself", hint="add method.draft_weights=int4, or draft=upper"
            )

    def prepare(self, model: ModelConfig) -> None:
        """Some layers are quantized; the draft's method finds what it needs (KVQuant's calibration)."""
        self._check_layers(model.layers())
        if self.own_cache:
            draft = self.draft_method()
            with _named_for_the_draft():
                draft.prepare(model)
            self.__dict__["told"] = draft

    def _check_layers(self, layers: int | None) -> None:
        if layers is not None and self.sensitive_layers >= layers:
            raise CombinationError(
                "method.sensitive_layers",
                self.sensitive_layers,
                f"leaves nothing to quantize: the model has {layers} layers",
                allowed=f"0 to {layers - 1}",
            )

    def identity(self) -> dict[str, Any]:
        """What stands for the draft's hyper-parameters in its own method's identity (KVQuant: the calibration)."""
        found = self.draft_method().identity() if self.own_cache else {}
        return {"draft_options": {**(self.draft_options or {}), **found}} if found else {}

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """A cache; it leads a second one where the draft has its own.

        Raises:
            ConfigError: no layer is left to quantize, or what the base and the draft's method refuse.
        """
        self._check_layers(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None))
        cache = super().new_cache(model, prompts, max_length)
        if self.own_cache:
            cache.lead(self.draft_method().new_cache(model, prompts, max_length))
        return cache

    def detach(self, model: PreTrainedModel) -> None:
        """Also take the draft's 4-bit weights away."""
        from kvbench.models import int4

        super().detach(model)
        int4.detach(model)

    def exact(self, layer: KVLayer) -> bool:
        """Whether a layer packs nothing."""
        return self.target == "fp16" or layer.index < self.sensitive_layers

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Packed tokens and the double buffer, 2 G + gamma + 1 tokens; or everything exact."""
        if self.exact(layer):
            return [self.full(layer, side, capacity=layer.expected_length() + self.gamma + 1)]
        assert self.quantizer is not None
        form = self.quantizer.key if side == "key" else self.quantizer.value
        room = max(layer.expected_length() - self.G, 0) // self.G * self.G
        return [
            self.packed(layer, side, affine(form, layer.key_dim if side == "key" else layer.value_dim), capacity=room),
            self.full(layer, side, capacity=2 * self.G + self.gamma + 1, slack=0),
        ]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Whole groups but for the newest G to 2 G - 1 tokens packed; nothing of a prompt of up to 2 G."""
        count = layer.real_tokens(rows.indices(layer.batch)[0])
        border = 0 if self.exact(layer) else max(self.border(count) - (count - keys.shape[2]), 0)
        for store, x in zip(layer.stores(), (keys, values), strict=True):
            if border:
                store.packed.append(rows, x[:, :, :border])
            store.tail.append(rows, x[:, :, border:])

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """What is hidden, G at a time where any of what is seen is packed."""
        return whole(hidden, self.unit(layer.window, self.exact(layer)))

    def unit(self, window: int | None, exact: bool) -> int:
        """Tokens that leave a layer with a sliding window together; `exact`: it packs nothing."""
        return 1 if exact or (window is not None and window - 1 <= self.G) else self.G

    def border(self, count: int) -> int:
        """Tokens of a prompt of `count` that are packed."""
        return count - self.G - count % self.G if count > 2 * self.G else 0

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Flush (Algorithm 1, lines 24-27): while the buffer holds 2 G, its older half is quantized."""
        if self.exact(layer):
            return
        for store in layer.stores():
            tail = store.tail
            while tail.length(rows) >= 2 * self.G:
                store.packed.append(rows, tail.view(rows)[:, :, : self.G])
                tail.drop_front(rows, self.G)


@contextmanager
def _named_for_the_draft() -> Iterator[None]:
    """A wrong key of the draft's method is called by the name that it has in QuantSpec's."""
    try:
        yield
    except ConfigError as error:
        inside = error.key.removeprefix("method.")
        key = "method.draft" if inside == "method" else f"method.draft_options.{inside}"
        raise ConfigError(key, error.value, error.problem, allowed=error.allowed, hint=error.hint) from error
