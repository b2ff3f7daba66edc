"""What a method is: a dataclass whose fields are its hyper-parameters, and two rules over the stores.

A method says which segments the keys and the values of a layer have (:meth:`Method.segments`), where the prompt's
tokens go (:meth:`Method.place`) and what moves as the sequence grows (:meth:`Method.settle`). Packing, attention, the
bill, padding, rollback, beams and the benchmarks come with the stores. This module imports no torch, so that a
configuration is checked in a moment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.methods.speculation import Speculation
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


#: tokens after a window's prompt that stand for the question of methods that look at one
QUERY_TOKENS = 64


@dataclass(frozen=True)
class Reach:
    """How far a method leaves a sequence alone.

    Args:
        key, value: the hyper-parameter that says so.
        tokens: as long as no more than these are cached, all of them are exact.
        of_prompt: whether only the prompt's tokens count.
    """

    key: str
    value: Any
    tokens: int
    of_prompt: bool = False


@dataclass(kw_only=True)
class Method:
    """Base of all methods.

    Args:
        takes: names of the quantizer presets that the method takes; ``none`` where it packs nothing.
        quantizer: the packed formats of keys and values (``quantizer=`` on the command line); None for ``none``.
    """

    takes: tuple[str, ...] = ("none",)
    quantizer: QuantizerSpec | None = field(default=None, metadata={"group": "quantizer"})

    #: raise it with a change of the method's outputs to get a run of its own beside that of the older code
    version: ClassVar[int] = 1
    #: how much of the prompt's attention the method sees: 0 nothing, n the last n queries, -1 column sums over all
    observe_prompt: ClassVar[int] = 0
    #: whether a cache can only be made for known prompts (``new_cache(model, prompts)`` with their ids and text)
    needs_prompts: ClassVar[bool] = False
    #: whether the method acts on the prompt alone, so that a text that comes token by token would all be kept
    prompt_only: ClassVar[bool] = False
    #: whether :meth:`observe` is called with the attention of every decode step
    observe_steps: ClassVar[bool] = False

    @property
    def speculation(self) -> Speculation | None:
        """How the method is decoded speculatively, or None: one token a step."""
        return None

    def alone(self) -> Method:
        """The method without its draft, for where no token is to be chosen (perplexity)."""
        return self

    #: whether :meth:`settle` only packs the oldest of the tails and drops it from their front, or rolls them behind
    #: their sinks, and does the same to layers in the same state: they may then pack, or roll, together, when all have
    #: settled
    rolls: ClassVar[bool] = False
    #: whether a token's stored form depends on that token and its position alone, so that any number may be taken back
    by_token: ClassVar[bool] = False
    #: the exact tails are the newest tokens without a gap, and all of them may be taken back, those of the prompt too
    #: (transformers' assisted generation verifies its first drafts with the prompt); of a prompt's values some then
    #: stay packed that a shorter prompt would have left exact
    gives_tail: ClassVar[bool] = False

    @property
    def settles(self) -> bool:
        """Whether anything moves as the sequence grows (:meth:`settle`)."""
        return type(self).settle is not Method.settle

    @property
    def packs_together(self) -> bool:
        """Whether :attr:`rolls` is said of the :meth:`settle` in use, not of one that a subclass has replaced."""
        owner = next(cls for cls in type(self).__mro__ if "settle" in vars(cls))
        return bool(vars(owner).get("rolls", False))

    @property
    def keys_before_rope(self) -> bool:
        """Whether keys are stored before RoPE, which attention then applies as it reads them."""
        return False

    @property
    def quantized_prefill(self) -> bool:
        """Whether the prompt's tokens attend to what is stored of them, not to exact keys and values."""
        return False

    @property
    def eager(self) -> bool:
        """Whether a step's own tokens are stored before it attends to them (only with :attr:`by_token`)."""
        return False

    # -- to be written by a method ----------------------------------------------------------------------------------

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Empty segments of one side of `layer`, in slot order, a :class:`FullSegment` last."""
        raise NotImplementedError(f"{type(self).__name__} must say which segments its stores have")

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Put the prompt's tokens into the stores.

        Args:
            layer: its stores are empty for `rows`.
            rows: rows of the batch whose prompts are equally long.
            keys, values: ``[rows, H, n, D]`` in full precision, without padding and what :meth:`forgotten` says: n
                may be less than ``layer.real_tokens(row)``.
            scores: what :attr:`observe_prompt` asked for, ``[rows, Hq, q, n]``, else None.
        """
        raise NotImplementedError(f"{type(self).__name__} must say where the prompt's tokens go")

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Demote what has grown too old. `rows` hold equally many tokens in each segment. May be called repeatedly."""

    def observe(self, layer: KVLayer, rows: slice, probabilities: torch.Tensor) -> None:
        """Attention of a decode step over the slots, ``[rows, Hq, q, slots]`` (only where :attr:`observe_steps`)."""

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Positions of a row's slots, ``[n]`` or ``[H, n]`` on the CPU; None where they are in order without a gap.

        A method that permutes or evicts tokens keeps them in ``layer.order``, or computes them here.
        """
        return layer.ordered(row)

    #: whether the method packs in formats of conf/quantizer, so that it cannot do without one
    needs_quantizer: ClassVar[bool] = False

    def packages(self) -> tuple[Package, ...]:
        """Packages beside kvbench's own that the method needs as it is set."""
        return ()

    def reach(self) -> Reach | None:
        """Up to how many tokens everything stays exact, and what sets it; None: the first tokens are touched."""
        return None

    def check_reach(self, max_length: int) -> None:
        """Raise ConfigError where a model of `max_length` tokens never has one that the method packs or drops."""
        reach = self.reach()
        if reach is not None and reach.tokens >= max_length - 1:  # the last token is never cached
            raise ConfigError(
                reach.key,
                reach.value,
                f"nothing would be packed or dropped: up to {reach.tokens} tokens all stay exact, and the model takes "
                f"model.max_length={max_length}",
                hint=f"a smaller {reach.key}, or method=fp16",
            )

    def check_windows(self, mode: str, prompt: int) -> None:
        """Raise ConfigError where windows of a text (perplexity) would not measure the method.

        Args:
            mode: ``decode``, ``simulated`` or ``fp16`` (:mod:`kvbench.tasks.perplexity`).
            prompt: tokens of a window that are a prompt.
        """
        name = type(self).__name__.lower()
        if mode == "fp16" and type(self).__name__ != "FP16":
            raise ConfigError(
                "dataset.mode", mode, f"reads no cache, so method={name} would have no effect", hint="method=fp16"
            )
        if mode == "simulated" and (self.needs_prompts or self.observe_prompt or getattr(self, "evict", False)):
            raise ConfigError("dataset.mode", mode, f"cannot be had for {name}: it needs a prompt, or drops tokens")
        if (self.needs_prompts or self.prompt_only) and prompt <= QUERY_TOKENS:
            raise ConfigError(
                "dataset.prefill",
                prompt,
                f"{name} looks at a prompt and quantizes or drops nothing else",
                hint="dataset.prefill=1024",
            )

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """How many of a row's oldest tokens are dropped on a layer with a sliding window.

        Args:
            hidden: oldest tokens that no later token sees. Fewer may be dropped, as groups leave as a whole. A method
                that says nothing keeps everything; attention masks what is hidden in any case.
        """
        return 0

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop what a sliding window has passed, after :meth:`settle`; here: where slots are in the order of positions.

        `rows` hold equally many tokens in each segment; `hidden` as for :meth:`forgotten`. May be called repeatedly.
        """
        gone = layer.real_tokens(rows.indices(layer.batch)[0]) - layer.length(rows)
        count = self.forgotten(layer, hidden) - gone
        if count > 0:
            for store in layer.stores():
                store.drop_front(rows, count)

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError for values or combinations that cannot run.

        Args:
            head_dim: channels of a head, where the model's architecture is known already.
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

    def fitted(self, head_dim: int) -> dict[str, int]:
        """Group sizes that a head of `head_dim` channels asks for in place of defaults, by the configuration's key.

        Empty: all are as given. A row and its label name them (``kivi int2+value.group_size=16``).
        """
        return (
            {} if self.quantizer is None else {f"quantizer.{k}": v for k, v in self.quantizer.fitted(head_dim).items()}
        )

    def prepare(self, model: ModelConfig) -> None:
        """Told the model's configuration, after :meth:`check` and before anything is loaded; may raise ConfigError."""

    def identity(self) -> dict[str, Any]:
        """What stands in a run's identity in place of hyper-parameters of these names (content in place of paths)."""
        return {}

    def ready(self) -> None:
        """Raise ModelError where something that the method needs beside the model cannot be had.

        A run asks before it loads the model; the answer must not take longer than a look at the disk and the network.
        """

    def reading_order(self, layer: KVLayer, rows: slice) -> list[tuple[int, int]] | None:
        """Slot ranges in the order in which attention visits them, or None: all slots, block by block.

        Only rows that are visited alike may be given together; a method that answers is asked row by row.
        """
        return None

    # -- for everybody ----------------------------------------------------------------------------------------------

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """A cache for one batch of prompts; switches `model` to kvbench's attention (:meth:`detach` undoes it).

        Args:
            model: any Hugging Face causal language model with full or sliding-window attention.
            prompts: padding, spans and queries of the rows; needed for prefill in chunks and by methods that look at
                the context. Without it the first forward pass is the whole prompt and padding is read off the mask.
            max_length: tokens of prompt and answer to allocate for; buffers grow when it is passed.

        Raises:
            ConfigError: a group does not divide the model's head dimension.
            ModelError: the model has layers that are no softmax attention.
        """
        from kvbench.attention.register import attach, check_served
        from kvbench.cache import KVCache, sliding

        check_served(model)  # before anything is said of groups, which such a model has no use for
        config = model.config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        try:
            self.check(head_dim)
        except ConfigError as error:
            raise for_python(error, self) from error
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
        """The empty store of one side of `layer`."""
        from kvbench.cache.store import Store

        return Store(self.segments(layer, side))

    def full(self, layer: KVLayer, side: Side, capacity: int = 0, slack: int = 64) -> Segment:
        """A full-precision segment for one side of `layer`."""
        from kvbench.cache.segments.base import FullSegment

        channels = layer.key_dim if side == "key" else layer.value_dim
        return FullSegment(
            layer.batch, layer.heads, channels, layer.dtype, layer.device, capacity=capacity, slack=slack
        )

    def packed(self, layer: KVLayer, side: Side, quantizer: AffineQuantizer, capacity: int = 0) -> Segment:
        """A packed segment for one side of `layer`."""
        from kvbench.cache.segments.packed import PackedSegment

        channels = layer.key_dim if side == "key" else layer.value_dim
        return PackedSegment(
            layer.batch,
            layer.heads,
            channels,
            layer.dtype,
            layer.device,
            quantizer=quantizer,
            side=side,
            capacity=capacity,
        )


def for_python(error: ConfigError, method: Method) -> ConfigError:
    """A refusal with a hint that can be typed as arguments of ``kvbench.load_method``."""
    side, _, last = error.key.removeprefix("quantizer.").partition(".")
    group = error.hint.partition("=")[2]
    if not error.key.startswith("quantizer.") or last != "group_size" or method.quantizer is None or not group:
        hint = re.sub(r"\b(?:method|quantizer)\.(\w+=)", r"\1", error.hint)
    else:
        forms = {}
        for name, form in (("key", method.quantizer.key), ("value", method.quantizer.value)):
            size = (int(group) if group.isdecimal() else group) if name == side else form.group_size
            forms[name] = {"bits": form.bits, "group_size": size, "axis": form.axis}
            if form.kind != "affine":
                forms[name]["kind"] = form.kind
        hint = f"{error.hint}; in Python: quantizer={forms}"
    return ConfigError(error.key, error.value, error.problem, allowed=error.allowed, hint=hint)


def affine(spec: FormatSpec, channels: int | None = None) -> AffineQuantizer:
    """The quantizer of a format: asymmetric with a floating-point minimum, or QuantSpec's two nibbles.

    Args:
        channels: of a head, to which a preset's group of channels is fitted; None: it is taken as it is.
    """
    from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer

    group = None if spec.group_size == "head_dim" else int(spec.group_size)
    if group is not None and channels is not None and spec.axis == "token":
        group = spec.channels_per_group(channels)
    if spec.kind == "hierarchical":
        return HierarchicalQuantizer(group, spec.axis)
    return AffineQuantizer(spec.bits, group, spec.axis)
