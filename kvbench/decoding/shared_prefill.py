"""One prefill for several methods: the prompt is read once, and each method places the same keys and values.

This is possible for methods whose prompt tokens attend in full precision: every layer then computes the same keys,
values and attention, whatever the method. A separate cache (:class:`_ReaderLayer`) reads the prompt and keeps the keys
and values of each layer, and what methods want to observe of the prompt's attention. Later the methods' caches are
filled with these, one after another, so that only one method's cache is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import Progress
from kvbench.cache.prompts import Prompts
from kvbench.cache.state_layer import KVStateLayer, StateLayer
from kvbench.decoding.passes import Rows, check_cache, now, prefill
from kvbench.errors import CacheError
from kvbench.methods.base import Method
from kvbench.methods.fp16 import FP16


def sharing_refusal(method: Method) -> str | None:
    """Return why a method cannot share a prefill with others; None if it can."""
    if method.quantized_prefill:
        return "its prompt attends to quantized keys and values"
    if method.keys_before_rope:
        return "it stores keys before RoPE, which a shared prefill does not keep"
    if method.speculation is not None:
        return "it decodes speculatively, with caches and weights of its own"
    return None


@dataclass
class _Piece:
    """The prompt of a group of rows in one layer, as a method's layer would get it.

    Args:
        group: the rows and the number of rows of the whole batch, if the batch was prefilled in groups; else None.
        keys: keys of the prompt, including padding, ``[rows, H, T, D]``.
        values: values of the prompt, including padding, ``[rows, H, T, Dv]``.
        observed: for each method, the statistics of the prompt's attention that it wants, or None.
    """

    group: tuple[slice, int] | None
    keys: Tensor
    values: Tensor
    observed: list[Tensor | None]


class _ReaderLayer(KVLayer):
    """A layer of the cache that reads a prompt for several methods.

    Args:
        members: the same layer in each method's cache.
        home: device on which to keep the prompt; None for that of the model.
    """

    def __init__(
        self,
        method: Method,
        index: int,
        progress: Progress,
        window: int | None,
        members: Sequence[KVLayer],
        home: torch.device | None,
    ) -> None:
        super().__init__(method, index, progress, window)
        self.members: list[KVLayer | None] = [*members]
        self.home = home
        self.pieces: list[_Piece] = []

    def chain(self) -> list[Any]:
        """Return this layer and the methods' layers, which also get the padding and observe the prompt's attention."""
        return [self, *filter(None, self.members)]

    def place(self, keys: Tensor, values: Tensor) -> None:
        """Keep the complete prompt of a group of rows, including padding: ``[B, H, T, D]`` and ``[B, H, T, Dv]``."""
        observed: list[Tensor | None] = []
        for member in filter(None, self.members):
            observed.append(None if member.observed is None else self._kept(member.observed))
            member.observed = None
        group = self.progress.prefill.group
        self.pieces.append(_Piece(group, self._kept(keys.detach()), self._kept(values.detach()), observed))
        self.prompt = None
        self.sealed = True

    def seal(self) -> None:
        """End a prefill in chunks: keep the prompt, unless that has been done."""
        if not self.sealed and self.prompt is not None:
            self.place(self.prompt[0].view(slice(None)), self.prompt[1].view(slice(None)))

    def _kept(self, x: Tensor) -> Tensor:
        return x if self.home is None or self.home == x.device else x.to(self.home)


class _ReaderStateLayer(KVStateLayer, _ReaderLayer):
    """A :class:`_ReaderLayer` that also has a state of fixed size, which the methods' caches copy."""

    def __init__(
        self, method: Method, layer: KVStateLayer, members: Sequence[KVLayer], home: torch.device | None
    ) -> None:
        StateLayer.__init__(self, layer.number_of_states, layer.place_in_model, layer.one_by_one)
        _ReaderLayer.__init__(self, method, layer.index, layer.progress, layer.window, members, home)


@dataclass
class ReadPrompt:
    """A prompt that was read once, from which the caches of several methods can be filled.

    Attributes:
        logits: logits of each prompt's last token, ``[B, V]``.
        seconds: time that the prefill took.
        path: name of the implementation that computed the prompt's attention.
        methods: number of methods that share the prefill.
    """

    logits: Tensor
    seconds: float
    path: str
    methods: int
    _layers: list[_ReaderLayer] = field(repr=False, default_factory=list)
    _states: list[StateLayer] = field(repr=False, default_factory=list)
    _members: list[KVCache | None] = field(repr=False, default_factory=list)
    _width: int = 0

    def nbytes(self, device: torch.device) -> int:
        """Return the bytes of the prompt's keys, values and statistics that are kept on a device."""
        tensors = [
            tensor
            for layer in self._layers
            for piece in layer.pieces
            for tensor in (piece.keys, piece.values, *piece.observed)
            if tensor is not None and tensor.device == device
        ]
        return sum(
            {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values()
        )

    @property
    def heads(self) -> tuple[int, ...]:
        """KV heads of each layer."""
        return tuple(layer.pieces[0].keys.shape[1] for layer in self._layers)

    @property
    def channels(self) -> int:
        """Channels of a head of the first layer."""
        return self._layers[0].pieces[0].keys.shape[-1]

    def admit(self, cache: KVCache) -> None:
        """Let :meth:`fill` fill one more empty cache, whose method must observe nothing of the prompt's attention.

        Raises:
            CacheError: the cache's method cannot share a prefill, or observes the prompt.
        """
        reason = sharing_refusal(cache.method)  # type: ignore[arg-type]
        if reason is None and any(layer.method.observe_prompt for layer in cache.kv_layers):
            reason = "it observes the prompt's attention, which has been computed already"
        if reason:
            raise CacheError(f"{type(cache.method).__name__} cannot share a prefill: {reason}")
        if None in self._members:  # the place of a cache that was forgotten
            self._members[self._members.index(None)] = cache
            return
        self._members.append(cache)
        for layer in self._layers:
            for piece in layer.pieces:
                piece.observed.append(None)

    def forget(self, cache: KVCache) -> None:
        """Drop the references to a cache that is no longer needed, and the statistics that were kept for it."""
        for place, member in enumerate(self._members):
            if member is cache:
                self._members[place] = None
                for layer in self._layers:
                    layer.members[place] = None
                    for piece in layer.pieces:
                        piece.observed[place] = None

    def fill(self, cache: KVCache) -> Tensor:
        """Let the method of a cache place the prompt, and return the logits of each prompt's last token, ``[B, V]``.

        The cache must be empty, and one of those for which the prompt was read.

        Raises:
            CacheError: the cache holds tokens already, or the prompt was not read for it.
            NonFiniteError: a key or a value to be packed is NaN or Inf.
        """
        place = next((i for i, member in enumerate(self._members) if member is cache), None)
        if place is None or cache.get_seq_length():
            raise CacheError("a shared prefill fills each of the caches that it was made for once, and no other cache")
        device, state = self.logits.device, cache.progress.prefill
        for number in range(len(self._layers[0].pieces)):  # group by group, as the caches' own prefill would
            for layer, source in zip(cache.kv_layers, self._layers, strict=True):
                piece = source.pieces[number]
                keys, values = piece.keys.to(device), piece.values.to(device)
                state.group = piece.group
                if not layer.is_initialized:
                    layer.initialize(keys, values)
                # the layer is as if it had just read the prompt itself
                layer.seen, layer.sealed = self._width, False
                observed = piece.observed[place]
                layer.observed = None if observed is None else observed.to(device)
                layer.place(keys, values)
        for mine, read_state in zip(cache.state_layers, self._states, strict=True):
            mine.take_state(read_state)
        state.group, state.path = None, self.path
        cache.finalize()
        check_cache(cache, self._width)
        return self.logits.clone()


@torch.inference_mode()
def read_prompts(
    model: PreTrainedModel,
    caches: Sequence[KVCache],
    prompts: Prompts,
    input_ids: Tensor,
    mask: Tensor | None,
    *,
    chunk: int | None = None,
    rows: Rows = "auto",
    home: torch.device | None = None,
) -> ReadPrompt:
    """Run the model on the prompts once, for the caches of several methods.

    Arguments that are not listed are those of :func:`kvbench.decoding.passes.prefill`.

    Args:
        caches: an empty cache of each method, made for these prompts. :func:`sharing_refusal` must return None for each
            method.
        prompts: padding and lengths of the prompts.
        home: device on which to keep keys and values; None for that of the model.

    Raises:
        CacheError: a method cannot share a prefill, or the model used another cache.
        NonFiniteError: the logits contain NaN or +Inf.
    """
    for cache in caches:
        reason = sharing_refusal(cache.method)  # type: ignore[arg-type]
        if reason:
            raise CacheError(f"{type(cache.method).__name__} cannot share a prefill: {reason}")
    method = FP16()
    reader = method.new_cache(model, prompts, max_length=input_ids.shape[1])
    reader.options = caches[0].options
    for place, layer in enumerate(reader.layers):
        if isinstance(layer, KVLayer):
            members = [cache.kv_layers[layer.index] for cache in caches]
            reader.layers[place] = (
                _ReaderStateLayer(method, layer, members, home)
                if isinstance(layer, KVStateLayer)
                else _ReaderLayer(method, layer.index, reader.progress, layer.window, members, home)
            )
    started = now(input_ids)
    logits = prefill(model, reader, input_ids, mask, chunk, rows)
    seconds = now(logits) - started
    return ReadPrompt(
        logits,
        seconds,
        reader.progress.prefill.path,
        len(caches),
        [layer for layer in reader.kv_layers if isinstance(layer, _ReaderLayer)],
        reader.state_layers,
        list(caches),
        input_ids.shape[1],
    )
