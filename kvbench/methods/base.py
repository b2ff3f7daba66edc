"""Base class of all methods: a dataclass whose fields are the hyper-parameters, and whose functions place the tokens.

A method defines which segments a layer has (:meth:`Method.segments`), into which of them the prompt's tokens go
(:meth:`Method.place`), and which tokens are packed or dropped as the sequence grows (:meth:`Method.settle`). It needs
no code of its own for packing, attention, counting bytes, padding, rollback, beams and the benchmarks. A
:class:`~kvbench.methods.recency.RecencyMethod` defines only how many of the newest tokens are in full precision, a
:class:`~kvbench.methods.scored.ScoredMethod` only a score per token. Torch is imported on first use, so that checking a
configuration is fast.

The cache and attention use only the base class :class:`kvbench.cache.policy.Policy`; this class adds the configuration.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.cache.policy import ALWAYS, SIDES, Policy
from kvbench.errors import CombinationError, ConfigError
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.layer_map import EXACT, EXACT_TARGET, Layers, forms, parse_layer_map, with_formats, written
from kvbench.methods.layer_map import KEY as LAYERS
from kvbench.methods.refusals import QUERY_TOKENS, Reach, check_spans, check_taken, for_python
from kvbench.quantizers.spec import FormatSpec, QuantizerSpec, Side, preset_name, taken
from kvbench.rotation.spec import RotationSpec
from kvbench.util.requirements import Package
from kvbench.util.schema import check_bounds, load_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.models.spec import ModelConfig
    from kvbench.quantizers.affine import AffineQuantizer
    from kvbench.rotation import Transform

__all__ = ["ALWAYS", "QUERY_TOKENS", "SIDES", "Method", "Reach", "Side", "affine"]


@dataclass(kw_only=True)
class Method(Policy["KVLayer"]):
    """Base of all methods, that is, of the rules that say which tokens are packed or dropped, and when.

    Args:
        takes: names of the quantizer presets that the method accepts. ``affine`` stands for all presets of this kind,
            ``none`` means that it can run without a quantizer.
        quantizer: packed formats of keys and values (``quantizer=`` on the command line); None for ``quantizer=none``.
        rotation: rotations that are applied to keys and to values before they are stored (``method.rotation.key=``).
        layers: a format for each of several ranges of layers, ``0-1:fp16,2-29:int4,30-:int8``: ``fp16``, a quantizer
            that the method takes, or one for keys and one for values (``int8/int4``). Other layers use `quantizer`.
            None: all layers use it.
    """

    #: to be increased when a change of the code changes the method's outputs, so that new runs do not reuse old results
    version: ClassVar[int] = 1
    #: the method packs in the formats of a quantizer (conf/quantizer) and cannot run without one
    needs_quantizer: ClassVar[bool] = False
    #: the method's own keys that set its bits, for the message about a quantizer that it does not take
    widths: ClassVar[tuple[str, ...]] = ()
    #: number of layers, counted from the first, that hold everything in full precision
    exact_layers = 0

    takes: tuple[str, ...] = ("none",)
    quantizer: QuantizerSpec | None = field(default=None, metadata={"group": "quantizer"})
    rotation: RotationSpec = field(default_factory=RotationSpec)
    layers: Layers = None

    @property
    def meaningless(self) -> str | None:
        """Dotted key of the setting that makes the generated text meaningless, so that only times count; or None."""
        return None

    def suit(self, numbers: Mapping[str, Any]) -> None:
        """Read the numbers on which the formats depend from a model's ``config.json``.

        The keys of a multimodal model's text model are on the first level of `numbers`.
        """

    def alone(self) -> Method:
        """Return this method without speculative decoding, for perplexity, which generates no tokens."""
        return self

    def transform(self, layer: KVLayer, side: Side) -> Transform | None:
        """Return the basis in which `layer` stores its keys or its values; None for the model's own basis.

        Attention rotates keys and queries after RoPE; it rotates values, and rotates the output back. A method may
        override this to choose a transform per layer, side and KV head. Of `layer` only index, sizes (``heads``,
        ``key_dim``, ``value_dim``) and device are known yet.
        """
        name = self.rotation.of(side)
        if name == "none":
            return None
        from kvbench.rotation import transform

        return transform(name, side, layer.key_dim if side == "key" else layer.value_dim, layer.device, layer.index)

    # -- stores and bytes -------------------------------------------------------------------------------------------

    def full(self, layer: KVLayer, side: Side, capacity: int = 0, slack: int = 64) -> Segment:
        """Return an empty full-precision segment for the keys or the values of `layer`.

        Args:
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

    def stored_as(self, layer: int, layers: int) -> int:
        """Return the index of the first layer with the same storage formats as `layer`; sliding windows may differ."""
        return min(layer, self.exact_layers, layers - 1)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of one layer's cache for one sequence from a formula, without making a cache.

        A method may define this or leave it out. The bill of a cache (:meth:`kvbench.cache.KVCache.bill`) counts real
        buffers instead; tests check that both agree to the byte.

        Raises:
            ConfigError: the method defines no formula.
        """
        raise ConfigError(
            "method",
            type(self).__name__,
            "does not define a formula for its bytes (Method.layer_bytes)",
            hint="run the method and read cache.bill(), or define layer_bytes",
        )

    # -- formats of single layers -----------------------------------------------------------------------------------

    def by_layer(self, count: int) -> list[Method]:
        """Return, for each layer with keys and values, this method, or one with the format that :attr:`layers` names.

        Layers with the same format share an instance.

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
        """Return the method for layers with the format `form`: ``fp16``, or one or two quantizer presets."""
        if form == EXACT:
            exact: Method = load_class("method._target_", EXACT_TARGET, EXACT_TARGET)()
            return exact
        return with_formats(self, form, taken(self.takes))

    # -- checks and identity ----------------------------------------------------------------------------------------

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a hyper-parameter, or a combination of several, is not valid.

        Args:
            head_dim: channels per head; None if the model's architecture is not known yet.
            max_length: largest number of tokens that the model accepts; None if not known yet.
        """
        check_bounds(self, "method")
        name = self.quantizer.name if self.quantizer else "none"
        accepted = taken(self.takes)
        if self.quantizer and {self.quantizer.key.kind, self.quantizer.value.kind} <= set(self.takes):
            accepted += (preset_name(name),)  # also a preset of a folder of the user's
        check_taken(type(self).__name__, accepted, name, self.needs_quantizer, self.widths)
        if self.quantizer:
            self.quantizer.check("quantizer", head_dim)
        self.rotation.check(head_dim)
        for form in dict.fromkeys(entry.form for entry in parse_layer_map(self.layers)):
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
        or dropped, or if the method never packs or drops any.
        """
        return None

    def check_reach(self, max_length: int) -> None:
        """Raise ConfigError if nothing would be packed or dropped in a sequence of `max_length` tokens."""
        if (reach := self.reach()) is not None:
            reach.check(max_length)

    def check_windows(self, mode: str, prompt: int) -> None:
        """Raise ConfigError if perplexity cannot be measured with this method in a mode, or would show no effect.

        Args:
            mode: ``decode`` (token by token through the cache), ``simulated`` (one pass with quantized keys and
                values) or ``fp16`` (one pass without a cache).
            prompt: number of tokens at the start of each span of text that are read in one pass, as a prompt.
        """
        check_spans(self, mode, prompt)

    def fitted(self, head_dim: int) -> dict[str, int]:
        """Return the group sizes that are reduced because the configured ones do not divide `head_dim` channels.

        Returns:
            The sizes in use by configuration key, for example ``{"quantizer.value.group_size": 16}``; for a format of
            :attr:`layers`, its name is part of the key: ``method.layers.int8.value.group_size``. Empty if all
            configured sizes divide the head. Results and labels show these sizes (``kivi int2+value.group_size=16``);
            those of :attr:`layers` appear in a message only.
        """
        specs = {"quantizer": self.quantizer}
        for form in dict.fromkeys(entry.form for entry in parse_layer_map(self.layers) if entry.form != EXACT):
            specs[f"{LAYERS}.{form}"] = self.in_format(form).quantizer
        return {
            f"{key}.{name}": size
            for key, spec in specs.items()
            if spec is not None
            for name, size in spec.fitted(head_dim).items()
        }

    def packages(self) -> tuple[Package, ...]:
        """Return the optional packages that the method needs with these hyper-parameters."""
        return ()

    def prepare(self, model: ModelConfig) -> None:
        """Let the method find or compute what depends on the model, such as a calibration file.

        A run calls this after :meth:`check` and before it loads the model's weights. An override may raise ConfigError.
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
        return {**named, "layers": written(self.layers)} if parse_layer_map(self.layers) else named

    def layer_identity(self) -> list[Any]:
        """Return the map of formats (:attr:`layers`) for a run's identity, with the formats in place of their names."""
        identity: list[Any] = []
        for entry in parse_layer_map(self.layers):
            spec = self.in_format(entry.form).quantizer if entry.form != EXACT else None
            sides = None if spec is None else [asdict(side) for side in (spec.key, spec.value)]
            identity.append([entry.first, entry.last, sides])
        return identity

    def identity(self) -> dict[str, Any]:
        """Return the values to hash into a run's id in place of certain hyper-parameters, by hyper-parameter name.

        For the path of a file, for example, it is a hash of the content. Other hyper-parameters are hashed as they are.
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
        from kvbench.attention import fused
        from kvbench.attention.register import attach
        from kvbench.attention.served import changes_logits, check_served, check_speculation
        from kvbench.cache import KVCache
        from kvbench.models.layers import layer_kinds
        from kvbench.util.attachment import placement

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
        cache.progress.storage = placement(model).storage
        if model.device.type == "cpu" and (any(own.holds_codes for own in methods) or changes_logits(model)):
            cache.progress.packer = fused.prepare()
        for layer, own in zip(cache.kv_layers, methods, strict=True):
            layer.method = own
        team = placement(model).team
        if team is not None:
            cache.progress.rank = team.rank, team.size
        if self.keys_before_rope:
            from kvbench.attention.rope import rotary

            rotation = rotary.attach_pre_rope(model)
            before = [layer for layer in cache.kv_layers if layer.method.keys_before_rope]
            for layer in before:
                layer.rope = rotation
            cache.progress.rope_from = before[0].index if before else 0
        return cache

    def detach(self, model: PreTrainedModel) -> None:
        """Restore the attention implementation that `model` had before :meth:`new_cache`."""
        from kvbench.attention.register import detach

        detach(model)


def affine(spec: FormatSpec, channels: int | None = None) -> AffineQuantizer:
    """Return the quantizer that encodes and decodes a packed format.

    For ``kind=affine`` it is asymmetric, with a floating-point minimum per group (KIVI). For ``kind=hierarchical`` each
    code consists of two nibbles (QuantSpec).

    Args:
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
