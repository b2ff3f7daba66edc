"""Base class of all methods: a dataclass whose fields are the hyper-parameters and whose methods place the tokens.

A method defines which segments store the keys and the values of a layer (:meth:`Method.segments`), into which of them
the prompt's tokens go (:meth:`Method.place`), and which tokens are packed or dropped as the sequence grows
(:meth:`Method.settle`). A method needs no code of its own for packing, attention, counting bytes, padding, rollback,
beams and the benchmarks. With two other base classes it needs even less: a
:class:`~kvbench.methods.recency.RecencyMethod` defines only how many of the newest tokens are in full precision, and a
:class:`~kvbench.methods.scored.ScoredMethod` only a score per token. Torch is imported on first use, so that checking a
configuration is fast.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from kvbench.errors import CombinationError, ConfigError
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.demotion import untouched
from kvbench.methods.layer_map import EXACT, EXACT_TARGET, Layers, forms, parse, with_formats, written
from kvbench.methods.python_hints import for_python
from kvbench.methods.reach import Reach
from kvbench.methods.takes import check_taken
from kvbench.methods.traits import Traits
from kvbench.quantizers.spec import FormatSpec, QuantizerSpec
from kvbench.rotation.spec import RotationSpec
from kvbench.util.requirements import Package
from kvbench.util.schema import load_class

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.cache.store import Store
    from kvbench.models.spec import ModelConfig
    from kvbench.quantizers.affine import AffineQuantizer
    from kvbench.rotation import Transform

Side = Literal["key", "value"]
#: the two sides of a layer, in the order of ``layer.stores()``
SIDES: tuple[Side, Side] = ("key", "value")

#: number of tokens that no sequence reaches: the result of :meth:`Method.idle` for a layer that never changes
ALWAYS = 1 << 30
#: perplexity: number of tokens right after a span's prompt that serve as the query for methods that need one
QUERY_TOKENS = 64


@dataclass(kw_only=True)
class Method(Traits):
    """Base of all methods, that is, of the rules that say which tokens are packed or dropped, and when.

    Args:
        takes: names of the quantizer presets that the method accepts. ``none`` means that it can run without a
            quantizer.
        quantizer: packed formats of keys and values (``quantizer=`` on the command line); None for ``quantizer=none``.
        rotation: the basis in which heads are stored: rotations of keys and of values (``method.rotation.key=``).
        layers: formats of single layers, ``0-1:fp16,2-29:int4,30-:int8``: a range of layers, and ``fp16`` or a
            quantizer that the method takes, or two for keys and values (``int8/int4``). Other layers use `quantizer`.
            None: all layers do.
    """

    takes: tuple[str, ...] = ("none",)
    quantizer: QuantizerSpec | None = field(default=None, metadata={"group": "quantizer"})
    rotation: RotationSpec = field(default_factory=RotationSpec)
    layers: Layers = None

    @property
    def settles(self) -> bool:
        """True if the method packs or drops tokens as the sequence grows, that is, if it overrides :meth:`settle`."""
        return type(self).settle is not Method.settle

    def alone(self) -> Method:
        """Return this method without speculative decoding, which perplexity cannot use because it generates no tokens.

        Only a method that speculates overrides this. This implementation returns the method itself.
        """
        return self

    def transform(self, layer: KVLayer, side: Side) -> Transform | None:
        """Return the basis in which `layer` stores its keys or its values; None for that of the model.

        Attention rotates keys and queries after RoPE, values and output. A method may override this to choose a
        transform per layer, side and KV head.

        Args:
            layer: the layer, whose sizes (``heads``, ``key_dim``, ``value_dim``) and device are known.
            side: ``key`` or ``value``.
        """
        name = self.rotation.of(side)
        if name == "none":
            return None
        from kvbench.rotation import transform

        return transform(name, side, layer.key_dim if side == "key" else layer.value_dim, layer.device, layer.index)

    # -- formats of single layers -----------------------------------------------------------------------------------

    def by_layer(self, count: int) -> list[Method]:
        """Return the method that serves each layer of a model: this one, or what :attr:`layers` makes of it.

        Layers with the same format share an instance.

        Args:
            count: number of layers of the model that have keys and values.

        Raises:
            ConfigError: the map does not fit the model, or names a format that the method does not take.
        """
        methods: dict[str | None, Method] = {None: self}
        for form in (by_layer := forms(self.layers, count)):
            if form not in methods:
                assert form is not None
                methods[form] = self.in_format(form)
        return [methods[form] for form in by_layer]

    def in_format(self, form: str) -> Method:
        """Return the method that serves the layers with a format of the map (:attr:`layers`).

        Args:
            form: ``fp16``, the name of a quantizer preset, or two for keys and values.
        """
        if form == EXACT:
            exact: Method = load_class("method._target_", EXACT_TARGET, EXACT_TARGET)()
            return exact
        return with_formats(self, form, self.takes)

    # -- the rules: defined by each method --------------------------------------------------------------------------

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return empty segments for the keys or the values of `layer`, in slot order.

        The last one must be a FullSegment, because new tokens are appended to it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define the method segments(layer, side)")

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Put the prompt's tokens into the stores of `layer`.

        The cache calls this once, when the prompt is complete; with :attr:`quantized_prefill`, once per chunk of the
        prompt.

        Args:
            layer: layer whose stores are empty for `rows`, or hold only the earlier chunks.
            rows: rows of the batch to store; their prompts are equally long.
            keys: keys ``[rows, H, n, D]`` in full precision, without padding. The first tokens are missing if
                :meth:`forgotten` drops them; n is then less than ``layer.real_tokens(row)``.
            values: values ``[rows, H, n, Dv]`` of the same tokens.
            scores: attention probabilities of the prompt, ``[rows, Hq, q, n]``, if the method requests them with
                :attr:`observe_prompt`: those of the last q queries, or one sum over all queries (q = 1). Otherwise
                None.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define the method place(layer, rows, keys, values, scores)"
        )

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Pack or drop the tokens for which this has become due since the last call.

        The cache calls this again and again while decoding. A second call without new tokens must change nothing. This
        implementation does nothing.

        Args:
            layer: layer to change.
            rows: rows of the batch to change; all of them have the same number of tokens in each segment.
        """

    def demotions(self, layer: KVLayer, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return after how many tokens :meth:`settle` packs or drops each token, for keys and for values.

        Define this for a rule that depends only on numbers of tokens: perplexity is then measured with many tokens per
        pass instead of token by token. It must be defined together with :meth:`settle`: in a class that overrides only
        :meth:`settle`, it returns None. This implementation returns None if the class has a :meth:`settle` of its own,
        and otherwise that no token is ever packed or dropped.

        Args:
            layer: layer that holds the tokens.
            count: number of tokens of the text, without padding.

        Returns:
            For keys and for values, int64 ``[count]`` on the CPU; :data:`kvbench.cache.policy.NEVER` for tokens that
            stay in full precision. None if the times are not known in advance, or if packed tokens change later.
        """
        if self.settles:
            return None
        never = untouched(count)
        return never, never

    def __init_subclass__(cls, **options: Any) -> None:
        """Forget an inherited :meth:`demotions` in a class with a :meth:`settle` of its own."""
        super().__init_subclass__(**options)
        if "settle" in vars(cls) and "demotions" not in vars(cls):
            cls.demotions = Method.demotions  # type: ignore[method-assign]

    def idle(self, layer: KVLayer, row: int) -> int:
        """Return how many more tokens a row may get before :meth:`settle` or :meth:`forget` changes the layer.

        Speculative decoding runs that many tokens ahead of the bookkeeping on the host. The result may be too small; 0
        is always correct. This implementation returns 0, or :data:`ALWAYS` if nothing is ever packed or dropped.

        Args:
            layer: a layer for which both methods have just been called.
            row: row of the batch.
        """
        return 0 if self.settles or layer.window else ALWAYS

    def observe(self, layer: KVLayer, rows: slice, probabilities: torch.Tensor) -> None:
        """Receive the attention of a decode step. Called only if :attr:`observe_steps` is True.

        Args:
            layer: layer in which the attention was computed.
            rows: rows of the batch.
            probabilities: attention probabilities of the step's q tokens, ``[rows, Hq, q, slots]``.
        """

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the position of the token in each slot of a row, ``[n]`` or ``[H, n]`` on the CPU.

        The shape is ``[H, n]`` if KV heads hold different tokens. None means that the slots hold the positions in
        ascending order without a gap. A method that permutes or evicts tokens stores the positions in ``layer.order``,
        or overrides this method to compute them.
        """
        return layer.ordered(row)

    def columns(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the column, in the padded batch, of the token that each slot of a row holds, ``[n]`` or ``[H, n]``.

        This tells which token of the text a slot holds. For most methods it is the same as :meth:`positions`. It
        differs if the method rotates keys to positions other than their own (StreamingLLM): :meth:`positions` then
        returns the positions that attention uses. None means that the slots hold all tokens in ascending order without
        a gap.
        """
        return self.positions(layer, row)

    def reading_order(self, layer: KVLayer, rows: slice) -> list[tuple[int, int]] | None:
        """Return the slot ranges ``(first, end)`` in the order in which attention reads them.

        None means that attention reads all slots in slot order. Rows may differ in their order, so if a method returns
        ranges, the cache asks for one row at a time.
        """
        return None

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return how many of a row's oldest tokens to drop, out of those that the layer's sliding window hides.

        The result may be smaller than `hidden`, because packed tokens can be dropped only in whole groups. Hidden
        tokens that stay are masked by attention. This implementation returns 0.

        Args:
            layer: layer with a sliding window (``layer.window``).
            hidden: number of oldest tokens that no later token can see.
        """
        return 0

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop the tokens that :meth:`forgotten` counts and that are still stored.

        The cache calls this after :meth:`settle`. A second call without new tokens changes nothing. This implementation
        requires that the slots are in the order of positions.

        Args:
            layer: layer with a sliding window.
            rows: rows of the batch to change; all of them have the same number of tokens in each segment.
            hidden: number of oldest tokens that no later token can see.
        """
        gone = layer.real_tokens(rows.indices(layer.batch)[0]) - layer.length(rows)
        count = self.forgotten(layer, hidden) - gone
        if count > 0:
            for store in layer.stores():
                store.drop_front(rows, count)

    def stored_as(self, layer: int, layers: int) -> int:
        """Return the index of the first layer that stores its tokens as a layer does, apart from sliding windows.

        This implementation distinguishes the first :attr:`exact_layers` layers from the others.

        Args:
            layer: index of the layer.
            layers: number of layers of the model.
        """
        return min(layer, self.exact_layers, layers - 1)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of one layer's cache for one sequence from a formula, without making a cache.

        A method may define this or leave it out. The bill of a cache (:meth:`kvbench.cache.KVCache.bill`) counts real
        buffers instead; tests check that both agree to the byte.

        Args:
            at: everything on which the bytes depend: shape of the layer, length of the prompt, and number of tokens so
                far (not a setting string of the command line).

        Returns:
            The bytes by part: codes, scales, full-precision tokens (``window``) and indices.

        Raises:
            ConfigError: the method defines no formula.
        """
        raise ConfigError(
            "method",
            type(self).__name__,
            "does not define a formula for its bytes (Method.layer_bytes)",
            hint="run the method and read cache.bill(), or define layer_bytes",
        )

    # -- checks and identity ----------------------------------------------------------------------------------------

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a hyper-parameter, or a combination of several, is not valid.

        Args:
            head_dim: channels per head; None if the model's architecture is not known yet.
            max_length: largest number of tokens that the model accepts; None if not known yet.
        """
        name = self.quantizer.name if self.quantizer else "none"
        check_taken(type(self).__name__, self.takes, name, self.needs_quantizer)
        if self.quantizer:
            self.quantizer.check("quantizer", head_dim)
        self.rotation.check(head_dim)
        for form in dict.fromkeys(entry.form for entry in parse(self.layers)):
            own = self.in_format(form)
            if form != EXACT:
                own.check(head_dim, max_length)
        if self.keys_before_rope and self.rotation.key != "none":
            raise CombinationError(
                "method.rotation.key",
                self.rotation.key,
                f"cannot be used with method={type(self).__name__.lower()}, which stores keys before RoPE: rotated "
                "heads must be stored after it",
                hint="rotate only the values: method.rotation.key=none method.rotation.value=hadamard",
            )

    def reach(self) -> Reach | None:
        """Return the largest number of tokens that the cache holds without packing or dropping any of them.

        The result also names the setting that determines this number. It is None if even the first token may be packed
        or dropped, or if the method never packs or drops any. This implementation returns None.
        """
        return None

    def check_reach(self, max_length: int) -> None:
        """Raise ConfigError if nothing would be packed or dropped in a sequence of `max_length` tokens."""
        reach = self.reach()
        if reach is not None:
            reach.check(max_length)

    def check_windows(self, mode: str, prompt: int) -> None:
        """Raise ConfigError if perplexity cannot be measured with this method in a mode, or would show no effect.

        Args:
            mode: how perplexity is measured: ``decode`` (token by token through the cache), ``simulated`` (one pass
                with quantized keys and values) or ``fp16`` (one pass without a cache).
            prompt: number of tokens at the start of each span of text that are read in one pass, as a prompt.
        """
        name = type(self).__name__.lower()
        if mode == "fp16" and type(self).__name__ != "FP16":
            raise ConfigError(
                "dataset.mode", mode, f"does not use a cache, so method={name} would have no effect", hint="method=fp16"
            )
        if mode == "simulated" and (self.needs_prompts or self.observe_prompt or self.drops_tokens):
            reason = "drops tokens" if self.drops_tokens else "depends on the prompt, which this mode does not have"
            raise ConfigError(
                "dataset.mode", mode, f"is not available for method={name}, which {reason}", hint="dataset.mode=decode"
            )
        if (self.needs_prompts or self.prompt_only) and prompt <= QUERY_TOKENS:
            raise ConfigError(
                "dataset.prefill",
                prompt,
                f"must be larger, because {name} quantizes or drops only tokens of a prompt",
                hint="dataset.prefill=1024",
            )

    def fitted(self, head_dim: int) -> dict[str, int]:
        """Return the group sizes that are reduced because the configured ones do not divide `head_dim` channels.

        Returns:
            The sizes in use by configuration key, for example ``{"quantizer.value.group_size": 16}``; empty if all
            configured sizes divide the head. Results and labels show these sizes (``kivi int2+value.group_size=16``).
        """
        return (
            {} if self.quantizer is None else {f"quantizer.{k}": v for k, v in self.quantizer.fitted(head_dim).items()}
        )

    def packages(self) -> tuple[Package, ...]:
        """Return the optional packages that the method needs with these hyper-parameters."""
        return ()

    def prepare(self, model: ModelConfig) -> None:
        """Let the method find or compute what depends on the model, such as a calibration file.

        A run calls this after :meth:`check` and before it loads the model's weights. This implementation does nothing;
        others may raise ConfigError.

        Args:
            model: the model's configuration.
        """

    def ready(self) -> None:
        """Raise ModelError if something that the method needs in addition to the model is unavailable.

        An example is a text encoder. A run calls this before it loads the model, so it must be quick. It may look for
        files and use the network, but should not load weights.
        """

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyper-parameters by name as plain data, without the quantizer, which is configured separately."""
        given = {entry.name for entry in fields(self) if entry.init} - {"quantizer"}
        if self.rotation.plain:  # so that the ids of runs from before this option hold
            given.discard("rotation")
        named = {name: setting for name, setting in asdict(self).items() if name in given - {"layers"}}
        return named if self.layers is None else {**named, "layers": written(self.layers)}

    def layer_identity(self) -> list[Any]:
        """Return the map of formats (:attr:`layers`) for a run's identity, with the formats in place of their names."""
        identity: list[Any] = []
        for entry in parse(self.layers):
            spec = self.in_format(entry.form).quantizer if entry.form != EXACT else None
            sides = None if spec is None else [asdict(side) for side in (spec.key, spec.value)]
            identity.append([entry.first, entry.last, sides])
        return identity

    def identity(self) -> dict[str, Any]:
        """Return what to hash into a run's id in place of certain hyper-parameters, by hyper-parameter name.

        A run's folder is named by a hash of everything that determines its outputs, hyper-parameters included. For some
        of them another value is better: for the path of a file, for example, a hash of the file's content. This
        implementation returns an empty dict, so all hyper-parameters are hashed as they are.
        """
        return {}

    # -- common to all methods --------------------------------------------------------------------------------------

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """Return an empty cache for one batch of prompts, and switch `model` to kvbench's attention.

        :meth:`detach` switches the model back.

        Args:
            model: any Hugging Face causal language model with full or sliding-window attention. Other layers of hybrid
                models keep transformers' own state.
            prompts: padding, contexts and questions of the rows. Required for a prefill in chunks, and for methods that
                read the text (Cocktail). If None, the first forward pass must contain the whole prompt, and its
                attention mask tells the padding.
            max_length: number of tokens, prompt and answer together, for which to allocate buffers, which grow if there
                are more; None: not known.

        Raises:
            ConfigError: a hyper-parameter cannot run with this model, such as a group size that does not divide the
                number of channels per head.
            ModelError: kvbench does not support the model, or the method speculates and the model is a hybrid.
        """
        from kvbench.attention.register import attach, check_served, check_speculation
        from kvbench.cache import KVCache
        from kvbench.models.layers import layer_kinds

        check_served(model)  # first: without softmax attention the check of groups would be misleading
        config = model.config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        try:
            self.check(head_dim)
            kinds = layer_kinds(model.config)
            methods = self.by_layer(sum(kind.attends for kind in kinds))
        except ConfigError as error:
            raise for_python(error, self.quantizer) from error
        attach(model)
        check_speculation(self.speculation, kinds, type(model).__name__)
        cache = KVCache(self, len(kinds), prompts, max_length, kinds=kinds)
        for layer, own in zip(cache.kv_layers, methods, strict=True):
            layer.method = own
        if self.keys_before_rope:
            from kvbench.attention.rope import pre_rope

            rotation = pre_rope.attach(model)
            before = [layer for layer in cache.kv_layers if layer.method.keys_before_rope]
            for layer in before:
                layer.rope = rotation
            cache.progress.rope_from = before[0].index if before else 0
        return cache

    def detach(self, model: PreTrainedModel) -> None:
        """Restore the attention implementation that `model` had before :meth:`new_cache`."""
        from kvbench.attention.register import detach

        detach(model)

    def make_store(self, layer: KVLayer, side: Side) -> Store:
        """Return an empty store for the keys or the values of `layer`."""
        from kvbench.cache.store import Store

        return Store(self.segments(layer, side))

    def full(self, layer: KVLayer, side: Side, capacity: int = 0, slack: int = 64) -> Segment:
        """Return an empty full-precision segment for the keys or the values of `layer`.

        Args:
            layer: layer that gives shape, dtype and device.
            side: ``key`` or ``value``.
            capacity: number of tokens for which to allocate now.
            slack: number of tokens that are allocated in excess whenever the buffer has to grow.
        """
        from kvbench.cache.segments.base import FullSegment

        shape = (layer.batch, layer.heads, layer.key_dim if side == "key" else layer.value_dim)
        return FullSegment(*shape, layer.dtype, layer.device, capacity=capacity, slack=slack)

    def packed(
        self,
        layer: KVLayer,
        side: Side,
        quantizer: AffineQuantizer,
        capacity: int = 0,
        *,
        whole_tiles: bool = False,
    ) -> Segment:
        """Return an empty packed segment for the keys or the values of `layer`.

        Args:
            layer: layer that gives shape, dtype and device.
            side: ``key`` or ``value``.
            quantizer: encodes and decodes the tokens.
            capacity: number of tokens for which to allocate now.
            whole_tiles: how to count the bytes of the last tile (128 tokens) if it is incomplete. True: as those of a
                whole tile, for segments so short that its unused part matters. False: only those of its tokens.
        """
        from kvbench.cache.segments.packed import PackedSegment

        shape = (layer.batch, layer.heads, layer.key_dim if side == "key" else layer.value_dim)
        return PackedSegment(
            *shape,
            layer.dtype,
            layer.device,
            quantizer=quantizer,
            side=side,
            capacity=capacity,
            whole_tiles=whole_tiles,
        )


def affine(spec: FormatSpec, channels: int | None = None) -> AffineQuantizer:
    """Return the quantizer that encodes and decodes a packed format.

    For ``kind=affine`` it is asymmetric, with a floating-point minimum per group (KIVI). For ``kind=hierarchical`` each
    code consists of two nibbles (QuantSpec).

    Args:
        spec: the format.
        channels: channels per head. If the format comes from a preset and its group size does not divide this number, a
            smaller group size is used. None: the group size stays as it is.
    """
    from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer

    group = None if spec.group_size == "head_dim" else int(spec.group_size)
    if group is not None and channels is not None and spec.axis == "token":
        group = spec.channels_per_group(channels)
    if spec.kind == "hierarchical":
        return HierarchicalQuantizer(group, spec.axis)
    return AffineQuantizer(spec.bits, group, spec.axis)
