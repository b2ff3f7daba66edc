"""Base class of all methods: a dataclass whose fields are the hyper-parameters, and the rules over the stores.

A method defines which segments the keys and the values of a layer have (:meth:`Method.segments`), where the prompt's
tokens go (:meth:`Method.place`) and what moves as the sequence grows (:meth:`Method.settle`). Packing, attention, the
bill, padding, rollback, beams and the benchmarks come with the stores. Two bases ask for less:
:class:`~kvbench.methods.recency.RecencyMethod` for the number of exact tokens, and
:class:`~kvbench.methods.scored.ScoredMethod` for a score of each token. Torch is imported on first use, so that a
configuration is checked in a moment.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from kvbench.errors import ConfigError
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.python_hints import for_python
from kvbench.methods.reach import Reach
from kvbench.methods.traits import Traits
from kvbench.quantizers.spec import FormatSpec, QuantizerSpec, preset
from kvbench.util.requirements import Package

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.cache.store import Store
    from kvbench.models.spec import ModelConfig
    from kvbench.quantizers.affine import AffineQuantizer

Side = Literal["key", "value"]
#: the stores of a layer, in their order
SIDES: tuple[Side, Side] = ("key", "value")

#: tokens after the prompt of a span (perplexity) that serve as the query of methods that need one
QUERY_TOKENS = 64


@dataclass(kw_only=True)
class Method(Traits):
    """Base of all methods.

    Args:
        takes: names of the quantizer presets that the method takes; ``none`` where it packs nothing.
        quantizer: the packed formats of keys and values (``quantizer=`` on the command line); None for ``none``.
    """

    takes: tuple[str, ...] = ("none",)
    quantizer: QuantizerSpec | None = field(default=None, metadata={"group": "quantizer"})

    @property
    def settles(self) -> bool:
        """True if anything moves as the sequence grows (:meth:`settle`)."""
        return type(self).settle is not Method.settle

    def alone(self) -> Method:
        """Return the method without its draft, for uses that choose no tokens (perplexity)."""
        return self

    # -- the rules, written by a method -----------------------------------------------------------------------------

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return the empty segments of one side of `layer`, in slot order, a :class:`FullSegment` last."""
        raise NotImplementedError(f"{type(self).__name__} must define segments(layer, side)")

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Put the prompt's tokens into the stores.

        Args:
            layer: its stores are empty for `rows`.
            rows: rows of the batch whose prompts are equally long.
            keys, values: ``[rows, H, n, D]`` in full precision, without padding and without the tokens that
                :meth:`forgotten` drops: n may be less than ``layer.real_tokens(row)``.
            scores: the attention that :attr:`observe_prompt` asks for, ``[rows, Hq, q, n]``, else None.
        """
        raise NotImplementedError(f"{type(self).__name__} must define place(layer, rows, keys, values, scores)")

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Demote tokens that have grown too old. `rows` hold equally many in each segment. May be called repeatedly."""

    def observe(self, layer: KVLayer, rows: slice, probabilities: torch.Tensor) -> None:
        """Take the attention of a decode step, ``[rows, Hq, q, slots]`` (only with :attr:`observe_steps`)."""

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the positions of a row's slots, ``[n]`` or ``[H, n]`` on the CPU; None if in order without a gap.

        A method that permutes or evicts tokens keeps them in ``layer.order``, or computes them here.
        """
        return layer.ordered(row)

    def reading_order(self, layer: KVLayer, rows: slice) -> list[tuple[int, int]] | None:
        """Return slot ranges in the order in which attention visits them, or None: all slots, block by block.

        Only rows that are visited alike may be given together; a method that answers is asked row by row.
        """
        return None

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return how many of a row's oldest tokens are dropped on a layer with a sliding window.

        Args:
            hidden: oldest tokens that no later token sees. Fewer may be dropped, as groups leave as a whole. By
                default everything is kept; attention masks hidden tokens in any case.
        """
        return 0

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop tokens that a sliding window has passed, after :meth:`settle`; here for slots in order of position.

        `rows` hold equally many tokens in each segment; `hidden` as for :meth:`forgotten`. May be called repeatedly.
        """
        gone = layer.real_tokens(rows.indices(layer.batch)[0]) - layer.length(rows)
        count = self.forgotten(layer, hidden) - gone
        if count > 0:
            for store in layer.stores():
                store.drop_front(rows, count)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Return the bytes of one layer of one sequence, for predictions (optional).

        The bill of a cache (:meth:`kvbench.cache.KVCache.bill`) needs no formula; tests hold both equal to the byte.

        Raises:
            ConfigError: the method has no formula.
        """
        raise ConfigError(
            "method",
            type(self).__name__,
            "has no formula for its bytes (Method.layer_bytes)",
            hint="run it and read cache.bill()",
        )

    # -- checks and identity ----------------------------------------------------------------------------------------

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError for values or combinations that cannot run.

        Args:
            head_dim: channels of a head, if the model's architecture is known already.
            max_length: longest sequence of the model, likewise.
        """
        name = self.quantizer.name if self.quantizer else "none"
        if preset(name) not in self.takes:
            raise ConfigError(
                "quantizer",
                name,
                f"method {type(self).__name__.lower()} does not take this quantizer",
                allowed=self.takes or "none: method.takes is empty",
                hint=f"quantizer={self.takes[0]}" if self.takes else "method.takes=[int2]",
            )
        if self.needs_quantizer and self.quantizer is None:
            raise ConfigError(
                "quantizer",
                "none",
                f"{type(self).__name__} packs keys and values, and needs their format",
                hint="quantizer=int2 (from Python: load_method(..., quantizer='int2'))",
            )
        if self.quantizer:
            self.quantizer.check("quantizer", head_dim)

    def reach(self) -> Reach | None:
        """Return the longest text that stays exact, and what sets it; None if the first tokens are changed."""
        return None

    def check_reach(self, max_length: int) -> None:
        """Raise ConfigError if a model of `max_length` tokens never holds one that the method packs or drops."""
        reach = self.reach()
        if reach is not None:
            reach.check(max_length)

    def check_windows(self, mode: str, prompt: int) -> None:
        """Raise ConfigError if spans of a text (perplexity) would not measure the method.

        Args:
            mode: ``decode``, ``simulated`` or ``fp16`` (:mod:`kvbench.tasks.perplexity`).
            prompt: tokens of a span that are a prompt.
        """
        name = type(self).__name__.lower()
        if mode == "fp16" and type(self).__name__ != "FP16":
            raise ConfigError(
                "dataset.mode", mode, f"reads no cache, so method={name} would have no effect", hint="method=fp16"
            )
        if mode == "simulated" and (self.needs_prompts or self.observe_prompt or self.drops_tokens):
            raise ConfigError(
                "dataset.mode", mode, f"is not available for {name}, which needs a prompt or drops tokens"
            )
        if (self.needs_prompts or self.prompt_only) and prompt <= QUERY_TOKENS:
            raise ConfigError(
                "dataset.prefill",
                prompt,
                f"{name} acts on a prompt, and quantizes or drops nothing else",
                hint="dataset.prefill=1024",
            )

    def fitted(self, head_dim: int) -> dict[str, int]:
        """Return group sizes that replace defaults for a head of `head_dim` channels, by the configuration's key.

        Empty: all are as given. A row and its label name them (``kivi int2+value.group_size=16``).
        """
        return (
            {} if self.quantizer is None else {f"quantizer.{k}": v for k, v in self.quantizer.fitted(head_dim).items()}
        )

    def packages(self) -> tuple[Package, ...]:
        """Return the packages beyond kvbench's own that the method needs with these hyper-parameters."""
        return ()

    def prepare(self, model: ModelConfig) -> None:
        """Take the model's configuration: called after :meth:`check`, before loading; may raise ConfigError."""

    def ready(self) -> None:
        """Raise ModelError if something that the method needs besides the model is unavailable.

        A run asks before it loads the model; the answer must not take longer than a look at the disk and the network.
        """

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyper-parameters as plain data, without the quantizer, which is a group of its own."""
        given = {entry.name for entry in fields(self) if entry.init} - {"quantizer"}
        return {name: setting for name, setting in asdict(self).items() if name in given}

    def identity(self) -> dict[str, Any]:
        """Return what replaces hyper-parameters of these names in a run's identity (content in place of paths)."""
        return {}

    # -- for everybody ----------------------------------------------------------------------------------------------

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """Return a cache for one batch of prompts; switch `model` to kvbench's attention (:meth:`detach` undoes it).

        Args:
            model: any Hugging Face causal language model with full or sliding-window attention.
            prompts: padding, spans and queries of the rows; needed for prefill in chunks and by methods that look at
                the context. Without it the first forward pass is the whole prompt and padding is read off the mask.
            max_length: tokens of prompt and answer to allocate for; buffers grow when it is passed.

        Raises:
            ConfigError: a group does not divide the model's head dimension.
            ModelError: the model has layers without softmax attention.
        """
        from kvbench.attention.register import attach, check_served
        from kvbench.cache import KVCache, sliding

        check_served(model)  # first: groups mean nothing to such a model
        config = model.config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        try:
            self.check(head_dim)
        except ConfigError as error:
            raise for_python(error, self.quantizer) from error
        attach(model)
        cache = KVCache(self, config.num_hidden_layers, prompts, max_length, sliding.windows(model.config))
        if self.keys_before_rope:
            from kvbench.attention.rope import pre_rope

            rotation = pre_rope.attach(model)
            for layer in cache.layers:
                layer.rotation = rotation
        return cache

    def detach(self, model: PreTrainedModel) -> None:
        """Give `model` back the attention implementation that it had before :meth:`new_cache`."""
        from kvbench.attention.register import detach

        detach(model)

    def make_store(self, layer: KVLayer, side: Side) -> Store:
        """Return the empty store of one side of `layer`."""
        from kvbench.cache.store import Store

        return Store(self.segments(layer, side))

    def full(self, layer: KVLayer, side: Side, capacity: int = 0, slack: int = 64) -> Segment:
        """Return an empty full-precision segment for one side of `layer`."""
        from kvbench.cache.segments.base import FullSegment

        shape = (layer.batch, layer.heads, layer.key_dim if side == "key" else layer.value_dim)
        return FullSegment(*shape, layer.dtype, layer.device, capacity=capacity, slack=slack)

    def packed(self, layer: KVLayer, side: Side, quantizer: AffineQuantizer, capacity: int = 0) -> Segment:
        """Return an empty packed segment for one side of `layer`."""
        from kvbench.cache.segments.packed import PackedSegment

        shape = (layer.batch, layer.heads, layer.key_dim if side == "key" else layer.value_dim)
        return PackedSegment(*shape, layer.dtype, layer.device, quantizer=quantizer, side=side, capacity=capacity)


def affine(spec: FormatSpec, channels: int | None = None) -> AffineQuantizer:
    """Return the quantizer of a format: asymmetric with a floating-point minimum, or QuantSpec's two nibbles.

    Args:
        channels: of a head, to which a preset's group of channels is fitted; None: the group is taken as it is.
    """
    from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer

    group = None if spec.group_size == "head_dim" else int(spec.group_size)
    if group is not None and channels is not None and spec.axis == "token":
        group = spec.channels_per_group(channels)
    if spec.kind == "hierarchical":
        return HierarchicalQuantizer(group, spec.axis)
    return AffineQuantizer(spec.bits, group, spec.axis)
