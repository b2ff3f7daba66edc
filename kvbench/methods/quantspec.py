"""QuantSpec: a cache packed in two nibbles, with a double full-precision buffer; the draft reads the upper nibbles.

Source: Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache" (2025), sec. 4.2, 4.3
and Algorithm 1. The state after the prompt is that of the first author's code (rishabh-16/QuantSpec,
Engine/backend_quantspec.py), which never flushes the buffer while decoding. The decoding loop is in
:mod:`kvbench.decoding.speculative`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from kvbench.errors import CombinationError, ConfigError
from kvbench.methods.base import SIDES, Method, Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.recency import RecencyMethod
from kvbench.methods.speculation import AUTO, OWN_VIEWS, Speculation, Weights
from kvbench.util.requirements import Package
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.models.spec import ModelConfig


#: hyper-parameters of the paper's sparse drafts (sec. 5.1): a quarter of the context, the rest as in MagicDec's code
SPARSE: dict[str, dict[str, Any]] = {
    "streamingllm": {"budget": 0.25, "sinks": 16},
    "snapkv": {"budget": 0.25, "kernel": 5, "pooling": "avg", "group": "sum", "group_after_pooling": True},
    "h2o": {"budget": 0.25},
}


@dataclass(kw_only=True)
class QuantSpec(RecencyMethod):
    """QuantSpec: tokens are packed in two nibbles; the draft of speculative decoding reads only the upper ones.

    G is the group size of the keys (``quantizer.key.group_size``), which are stored after RoPE. The newest tokens are
    in a double buffer of 2 G tokens in full precision. Whenever the buffer is full, its older half of G tokens is
    quantized, which makes one group of keys per channel. In a sequence of at least G tokens, the buffer therefore holds
    G to 2 G - 1 of them. A round of speculation adds up to gamma + 1 tokens, which count only once they can no longer
    be rejected.

    On a layer with a sliding window, this rule counts all tokens of the text, hidden ones included, and hidden tokens
    are dropped G at a time. A sliding window of at most G + 1 tokens never shows a packed token, so such a layer holds
    all tokens in full precision, as with fp16.

    Args:
        gamma: tokens drafted per round (paper: 1 to 6, chosen by search). 0: no speculation; the target alone decodes.
            ``auto``: 1 to 8, chosen for each round from measured times and the running acceptance
            (:class:`kvbench.decoding.round_times.Gamma`), and thus different from run to run, as are sampled tokens
            then. With ``target=int8``, greedy tokens may differ too where two are almost equally probable, because
            tokens are packed between rounds.
        draft: cache that the draft reads. ``upper``: the upper nibbles of the target's cache (QuantSpec). ``full``:
            both nibbles of it, to isolate the effect of the draft's weights (Fig. 5). The name of another method
            (``streamingllm`` and ``snapkv``, which are the paper's baselines, or ``kivi``, ``logquant``, ...): a second
            cache for the same prompt, kept by that method.
        draft_options: hyper-parameters of the method that `draft` names, and under ``quantizer`` the name of its
            quantizer preset. For ``streamingllm``, ``snapkv`` and ``h2o`` the defaults are a budget of a quarter of the
            context and MagicDec's settings (:data:`SPARSE`).
        draft_weights: weights of the draft. ``same``: the target's; ``int4``: feed-forward layers in 4 bits;
            ``int4_all``: every linear layer and the output head in 4 bits. With ``model.weights=int4``, choose
            ``same``: target and draft then share the 4-bit weights.
        target: cache that the target reads. ``int8``: both nibbles (QuantSpec); ``fp16``: a cache in full precision, as
            for the paper's sparse baselines.
        sensitive_layers: L_S, number of first layers whose keys and values stay in full precision for target and draft;
            less than the model's number of layers.
        forced_acceptance: probability with which each draft is accepted, by chance and independently of its token, to
            measure the speed at a certain acceptance with random weights. The text is then meaningless, so that only
            the data sets of times and memory (``dataset=efficiency``) accept it. None: drafts are accepted by
            comparison with the target.
    """

    gamma: int | Literal["auto"] = bounded(4, minimum=0, maximum=64)
    draft: str = "upper"
    draft_options: Any = None
    draft_weights: Weights = "same"
    target: Literal["int8", "fp16"] = "int8"
    sensitive_layers: int = bounded(0, minimum=0)
    forced_acceptance: float | None = bounded(None, minimum=0.0, maximum=1.0)

    @property
    def G(self) -> int:
        """Number of tokens per group of keys, which is also half of the double buffer."""
        assert self.quantizer is not None
        return int(self.quantizer.key.group_size)

    @property
    def speculation(self) -> Speculation | None:
        """Settings of speculative decoding; None for ``gamma=0``."""
        if not self.gamma:
            return None
        return Speculation(
            gamma=self.gamma, draft=self.draft, weights=self.draft_weights, forced=self.forced_acceptance
        )

    @property
    def _longest(self) -> int:
        """Largest number of tokens drafted in a round."""
        return max(AUTO) if self.gamma == "auto" else self.gamma

    @property
    def meaningless(self) -> str | None:
        """Setting that makes generated text meaningless: ``method.forced_acceptance``; None if it is not set."""
        return None if self.forced_acceptance is None else "method.forced_acceptance"

    def alone(self) -> QuantSpec:
        """Return the method with the same target but no draft, for perplexity, which generates no tokens."""
        return replace(self, gamma=0, forced_acceptance=None)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyper-parameters by name; `forced_acceptance` only if set, so that older run ids stay valid."""
        named = super().hyperparameters()
        if self.forced_acceptance is None:
            del named["forced_acceptance"]
        return named

    @property
    def needs_prompts(self) -> bool:  # type: ignore[override]
        """True if :meth:`new_cache` requires `prompts`, because the method of the draft's own cache reads the text."""
        return self.own_cache and self.draft_method.needs_prompts

    @property
    def own_cache(self) -> bool:
        """True if the draft has its own cache; False if it reads the target's cache, or if there is no draft."""
        return bool(self.gamma) and self.draft not in OWN_VIEWS

    @cached_property
    def draft_method(self) -> Method:
        """Method of the draft's own cache. It exists only if :attr:`own_cache` is True."""
        from kvbench.methods.load import load_method

        options = {**SPARSE.get(self.draft, {}), **(self.draft_options or {})}
        with _named_for_the_draft():
            return load_method(self.draft, **options)

    def packages(self) -> tuple[Package, ...]:
        """Return the optional packages that the draft's method needs; none unless the draft has its own cache."""
        return self.draft_method.packages() if self.own_cache else ()

    def reach(self) -> Reach | None:
        """Return the largest number of tokens that are all exact in the target: 2 G - 1; None for ``target=fp16``."""
        if self.target == "fp16":
            return None
        return Reach("quantizer.key.group_size", self.G, 2 * self.G - 1)

    def ready(self) -> None:
        """Raise ModelError if something that the draft needs, such as a text encoder, is unavailable."""
        if self.own_cache:
            with _named_for_the_draft():
                self.draft_method.ready()

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if the quantizer, `gamma` or an option of the draft cannot be used.

        With ``gamma > 0``, the draft must differ from the target: ``upper`` requires ``target=int8``, and ``full``
        requires 4-bit `draft_weights`.
        """
        super().check(head_dim, max_length)
        self._check_draft(head_dim, max_length)

    def check_rule(self) -> None:
        """Raise ConfigError if the quantizer or `gamma` does not fit the paper's scheme.

        The format must be ``hierarchical``: codes of 8 bits, whose upper 4 bits the draft can read alone. Keys must be
        grouped per channel and values per token. `gamma` must be below :attr:`G`, so that the tokens of one round fit
        into half of the double buffer.
        """
        for side, form in zip(SIDES, self.formats(), strict=True):
            if form.kind != "hierarchical":
                raise ConfigError(
                    f"quantizer.{side}.kind",
                    form.kind,
                    "must be hierarchical, because quantspec stores two nibbles",
                    allowed="hierarchical",
                )
        if [form.axis for form in self.formats()] != ["channel", "token"]:
            name = self.quantizer.name if self.quantizer else "none"
            raise ConfigError(
                "quantizer",
                name,
                "does not have keys grouped per channel and values grouped per token, as quantspec requires (sec. 4.2)",
            )
        if self._longest >= self.G:
            raise ConfigError(
                "method.gamma",
                self.gamma,
                f"must be smaller than half of the double buffer, quantizer.key.group_size={self.G}"
                + (f"; auto chooses from 1 to {self._longest}" if self.gamma == "auto" else ""),
                allowed=f"0 to {self.G - 1}",
            )
        if self.forced_acceptance is not None and not self.gamma:
            raise ConfigError(
                "method.forced_acceptance",
                self.forced_acceptance,
                "has no effect with method.gamma=0, which drafts nothing",
                hint="method.gamma=4",
            )
        super().check_rule()

    def _check_draft(self, head_dim: int | None, max_length: int | None) -> None:
        if not isinstance(self.draft_options, Mapping | None):
            raise ConfigError(
                "method.draft_options",
                self.draft_options,
                "must map option names to values",
                hint="method.draft_options={residual:64}",
            )
        if self.draft not in OWN_VIEWS:  # checked with gamma=0 too: a misspelt name is always an error
            if self.draft == "quantspec":
                raise ConfigError("method.draft", self.draft, "cannot be its own draft", hint="method.draft=upper")
            draft = self.draft_method  # raises errors that already name draft_options
            with _named_for_the_draft():
                draft.check(head_dim, max_length)
            return
        if self.draft_options:
            raise ConfigError(
                "method.draft_options",
                dict(self.draft_options),
                f"has no effect with method.draft={self.draft}",
                hint="name a draft method, for example method.draft=kivi",
            )
        if not self.gamma:
            return  # without speculation draft and target need not differ
        if self.draft == "upper" and self.target == "fp16":
            raise ConfigError(
                "method.target",
                "fp16",
                "does not store the nibbles that method.draft=upper reads",
                hint="method.target=int8",
            )
        if self.draft == "full" and self.draft_weights == "same":
            raise ConfigError(
                "method.draft",
                "full",
                "makes the draft identical to the target, because method.draft_weights=same",
                hint="set method.draft_weights=int4 or method.draft=upper",
            )

    def prepare(self, model: ModelConfig) -> None:
        """Let the draft's method find or compute what depends on the model, such as KVQuant's calibration file.

        Raises:
            ConfigError: `sensitive_layers` leaves no layer to quantize, or the draft's method cannot run with this
                model.
        """
        self._check_layers(model.layers())
        if self.own_cache:
            with _named_for_the_draft():
                self.draft_method.prepare(model)

    def _check_layers(self, layers: int | None) -> None:
        if layers is not None and self.sensitive_layers >= layers:
            raise CombinationError(
                "method.sensitive_layers",
                self.sensitive_layers,
                f"leaves no layer to quantize, because the model has {layers} layers",
                allowed=f"0 to {layers - 1}",
            )

    def identity(self) -> dict[str, Any]:
        """Return what to hash into a run's id in place of ``draft_options`` (:meth:`Method.identity`).

        The draft's method may have values to hash in place of its own options: KVQuant, for example, a hash of its
        calibration file in place of the path. The result is empty if it has none.
        """
        own = self.draft_method.identity() if self.own_cache else {}
        return {"draft_options": {**(self.draft_options or {}), **own}} if own else {}

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """Return an empty cache for the target, with the draft's cache attached to it if the draft has its own.

        One prefill fills both: the target's cache passes the keys and values of the prompt on to the draft's
        (:meth:`kvbench.cache.KVCache.lead`).

        Raises:
            ConfigError: `sensitive_layers` leaves no layer to quantize, or a setting of the target or the draft cannot
                run with this model.
        """
        from kvbench.models.layers import attending

        self._check_layers(len(attending(model.config)))
        cache = super().new_cache(model, prompts, max_length)
        if self.own_cache:
            room = None if max_length is None else max_length + self._longest + 1  # drafts beyond the last token
            cache.lead(self.draft_method.new_cache(model, prompts, room))
        return cache

    def detach(self, model: PreTrainedModel) -> None:
        """Restore the attention implementation that `model` had before, and remove the draft's 4-bit weights."""
        from kvbench.models import int4

        super().detach(model)
        int4.detach(model)

    # -- the rule ---------------------------------------------------------------------------------------------------

    def exact(self, n: int) -> int:
        """Return how many of the newest tokens are in full precision after `n` tokens.

        It is `n` if n < 2 G, else G + n mod G, where :attr:`G` is the group size: the double buffer has room for 2 G
        tokens, and packs the older G of them whenever it is full (Algorithm 1, lines 24-27).
        """
        return n if n < 2 * self.G else self.G + n % self.G

    def exact_after_prompt(self, n: int) -> int:
        """Return how many tokens are in full precision after a prompt of `n` tokens.

        The result is that of :meth:`exact`, except that a prompt of 2 G tokens stays in full precision, as in the
        authors' code.
        """
        return n if n == 2 * self.G else self.exact(n)

    def border(self, count: int) -> int:
        """Return how many tokens of a prompt of `count` tokens are packed."""
        return count - self.exact_after_prompt(count)

    @property
    def exact_layers(self) -> int:  # type: ignore[override]
        """Number of first layers that stay in full precision: `sensitive_layers` (L_S)."""
        return self.sensitive_layers

    def packs(self, layer: int, window: int | None) -> bool:
        """Return True if the layer packs tokens, False if it holds all of them in full precision.

        Three kinds of layers pack none: the first `sensitive_layers` layers, all layers of an fp16 target, and layers
        with a sliding window so short that a token would leave it before it could be packed.
        """
        return self.target != "fp16" and super().packs(layer, window) and (window is None or window - 1 > self.G)

    def packed_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty packed segment with room for whole groups of G tokens."""
        room = max(layer.expected_length() - self.G, 0) // self.G * self.G
        channels = layer.key_dim if side == "key" else layer.value_dim
        return self.packed(layer, side, self.make_quantizer(side, channels), capacity=room)

    def in_format(self, form: str) -> Method:
        """Return the method for layers with the format `form`; for ``fp16``, this one with ``target=fp16``."""
        return replace(self, target="fp16", layers=None) if form == "fp16" else super().in_format(form)

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty segment for the double buffer (2 G tokens) and gamma + 1 tokens of a round of speculation.

        On a layer that packs no tokens, it has room for all tokens instead.
        """
        if not self.packs(layer.index, None):
            return self.full(layer, side, capacity=layer.expected_length() + self._longest + 1)
        return self.full(layer, side, capacity=2 * self.G + self._longest + 1, slack=0)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of one layer for one sequence, as far as ``at.view`` counts them."""
        own = self.draft_method.layer_bytes(at) if self.own_cache and at.view != "target" else KVBytes()
        if self.own_cache and at.view == "draft":
            return own
        total = super().layer_bytes(at)
        if at.view == "draft" and self.draft == "upper" and self.gamma:  # the upper nibble of each byte
            total = replace(total, codes=total.codes // 2)
        return total + own


@contextmanager
def _named_for_the_draft() -> Iterator[None]:
    """Re-raise ConfigErrors of the draft's method under QuantSpec's keys.

    ``method.residual`` becomes ``method.draft_options.residual``.
    """
    try:
        yield
    except ConfigError as error:
        inside = error.key.removeprefix("method.")
        key = "method.draft" if inside == "method" else f"method.draft_options.{inside}"
        raise ConfigError(key, error.value, error.problem, allowed=error.allowed, hint=error.hint) from error
