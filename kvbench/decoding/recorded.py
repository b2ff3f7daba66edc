"""A forward pass of new tokens over buffers at fixed addresses, which a CUDA graph can record.

Before each pass the host does the bookkeeping (:meth:`Recorded.advance`): it lets the method pack or drop tokens,
reserves room for the new tokens in every layer, and sends lengths and places to the device in one small copy for all
layers. The device does the rest (:meth:`Recorded.run`) without waiting for the host: the model's forward pass,
appending, attention over everything stored, and the choice of the next token and its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.attention import fused, phases
from kvbench.attention.logits import PLAIN, Logits
from kvbench.attention.phases import FIELDS, NotServed, Work, assembled
from kvbench.attention.recorded import PassThrough, recording
from kvbench.cache import KVCache
from kvbench.cache.kernels import at_once, roll_together
from kvbench.cache.kernels.at_once import append
from kvbench.cache.kernels.pack import warm_packing
from kvbench.cache.kernels.pack_together import packing_together
from kvbench.cache.layer import KVLayer
from kvbench.cache.segments.packed import PackedSegment
from kvbench.decoding.recordable import STATES, check_recordable, expected
from kvbench.decoding.sampling import Sampling, pick_tokens, probabilities
from kvbench.decoding.segments import Spanning, Twins
from kvbench.decoding.tables import Layout, Upload, laid_out
from kvbench.rotation.step import step as rotate


@dataclass
class Place:
    """One layer of the cache in a captured step, with the buffers that the step reads and writes.

    Args:
        work: the layer's stored keys and values, in the form that kernels take. Its table, which tells kernels where
            each run of tokens in one format begins and how long it is, is a view of a buffer in device memory that the
            host updates before each step.
        places: for each row, the index in the buffers at which its next key and its next value are written, int32
            ``[B, 2]``; also a view of that buffer.
        sent: the same numbers in the first device's buffer, which the host updates; `places` itself if the layer is on
            the first device.
        kernel: name and module of the kernel that computes attention in the layer; None before the first pass.
    """

    layer: KVLayer
    work: Work
    places: Tensor
    sent: Tensor
    kernel: tuple[str, ModuleType] | None = None


class Recorded(Spanning):
    """Base class of forward passes over a few new tokens per row that can be recorded as a CUDA graph.

    A subclass defines :meth:`run`, the pass itself. Before each pass, call :meth:`advance`.

    Args:
        model: causal language model. :meth:`run` must be called inside :meth:`recording`.
        cache: the cache, which already contains the prompts.
        count: number of new tokens per row.
        device: device of tokens and positions: the first one, if layers are spread over several.
        upper: True: attention reads only the upper nibble of codes with two nibbles (QuantSpec's draft).

    Attributes:
        tokens, positions: input of the next pass, ``[B, count]``, at fixed addresses.
        state: tables of all layers on the first device, int32.
        version: number that increases when buffers have been reallocated, after which earlier recordings are invalid.
    """

    #: True if the method settles before every pass, so that it can add the attention of the pass before
    observed = False

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        batch: int,
        count: int,
        device: torch.device,
        *,
        upper: bool = False,
    ) -> None:
        super().__init__(cache.kv_layers, device)
        self.model, self.cache, self.count, self.upper = model, cache, count, upper
        with torch.inference_mode(False):
            self.tokens = torch.zeros(batch, count, dtype=torch.long, device=device)
            self.positions = torch.zeros_like(self.tokens)
        self.through = PassThrough()
        self.version = 0
        self.layers: list[Place] = []
        self._layout: Layout | None = None
        self._tails: list[Tail] = []  # of a cache in place, as they were in the last pass
        method = cache.method
        self._in_place = not method.settles and all(
            layer.window is None and method.reading_order(layer, slice(0, 1)) is not None for layer in cache.kv_layers
        )
        self._turn = 0  # index of the layer of the next call of `serve`

    def recording(self) -> AbstractContextManager[None]:
        """Return a context in which the model's attention is computed by :meth:`serve`."""
        before_rope = [layer.rope is not None for layer in self.cache.kv_layers]
        windows = [layer.window for layer in self.cache.kv_layers]
        return recording(self.model, self.serve, before_rope=before_rope, windows=windows)

    def run(self) -> None:
        """Queue the forward pass on the device; a subclass must define this method.

        The pass must use the same memory every time, and the host must not wait for the device.
        """
        raise NotImplementedError(f"{type(self).__name__} must define the method run(), its forward pass")

    def changed(self) -> list[Tensor]:
        """Return the input tensors that a pass changes, so that their values can be restored after a warm-up."""
        return [self.tokens, self.positions, *(place.sent for place in self._packing())]

    def pretend(self) -> None:
        """Keep warm-up passes from storing tokens in segments where a second storing would do harm.

        It is harmless to write full-precision tokens and codes twice, but outliers would be added twice. The effect
        ends when the tensors of :meth:`changed` are restored.
        """
        for place in self._packing():
            place.sent.fill_(-1)

    def _packing(self) -> list[Place]:
        return [place for place in self.layers if place.layer.packed_at_once() is not None]

    def begin(self, token: Tensor, lengths: Tensor) -> None:
        """Set the input of the next pass: the last token of each row ``[B]``, not cached yet, and all positions.

        `lengths` are the numbers of cached tokens of each row, ``[B]``.
        """
        self.tokens[:, :1].copy_(token[:, None])
        self.positions.copy_(lengths[:, None] + torch.arange(self.count, device=self.device))

    def forward(self, **keep: int) -> Tensor:
        """Run the model on :attr:`tokens` and return the logits, ``[B, n, V]``; of the last n if ``logits_to_keep=n``.

        Raises:
            NotServed: the model did not run attention exactly once per layer.
        """
        self._turn = 0
        with self.moving():
            logits: Tensor = self.model(
                input_ids=self.tokens,
                position_ids=self.positions,
                past_key_values=self.through,
                use_cache=True,
                **keep,
            ).logits
        if self._turn != len(self.layers):
            raise NotServed(f"the model ran attention {self._turn} times for {len(self.layers)} layers")
        return logits

    def check(self) -> None:
        """Raise NotServed if a layer cannot be served; see :func:`kvbench.decoding.recordable.check_recordable`."""
        check_recordable(self.cache, self.count, upper=self.upper, observed=self.observed)

    def warm(self) -> None:
        """Compile the kernels that the method will need to pack tokens or move windows between steps."""
        if not self.cache.method.settles:
            return
        seen: set[Any] = set()
        for layer in self.cache.kv_layers:
            for window in layer.rolling():
                roll = (window.sinks, window.channels, window.turn is None, window.device)
                if roll not in seen:
                    seen.add(roll)
                    roll_together.warm_rolling(window)
            if layer.packed_at_once() is not None:  # tokens that are packed before they attend never leave a window
                continue
            for store in layer.stores():
                for segment in store.segments:
                    if isinstance(segment, PackedSegment) and store.tail.capacity:
                        key = (segment.quantizer.bits, segment.quantizer.axis, segment.side, layer.device)
                        if key not in seen:
                            seen.add(key)
                            warm_packing(segment, store.tail.buffer[:, :, :1])

    # -- the host's part --------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Prepare the cache, and the tables that the device reads, for the next pass.

        The method packs or drops tokens, every layer reserves room for the new tokens, and the tables that tell kernels
        the lengths and the places of new tokens are copied to the device.

        Raises:
            NotServed: a layer cannot be served by a recorded pass.
            NonFiniteError: the method packed NaN or Inf.
        """
        if not self.cache.progress.frozen:
            settle(self.cache)
        places = [layer.advance(self.count) for layer in self.cache.kv_layers]
        layout = self._grown(places) or laid_out(self.cache, places)
        # the same addresses and phases: the recording stays valid, and only the numbers are sent again
        if not layout.same_buffers(self._layout):
            self.build(layout)
            self._upload = Upload(self.state)
        self._layout, self._tails = layout, tails(self.cache) if self._in_place else []
        self._upload.send(layout.numbers)

    def _grown(self, places: Sequence[Sequence[tuple[int, int]]]) -> Layout | None:
        """Return the last layout with the new tokens in it, if only the newest phases have grown; None otherwise.

        A cache in place has hundreds of segments in a layer, whose lengths and addresses take longer to collect than a
        step. Its method packs and drops nothing, so that all but the last of them stay as they are.
        """
        layout, before = self._layout, self._tails
        if layout is None or not before:
            return None
        now = tails(self.cache)
        for (lengths, starts, address), old in zip(now, before, strict=True):
            if (starts, address) != old[1:] or any(n != o + self.count for n, o in zip(lengths, old[0], strict=True)):
                return None
        batch = len(self.tokens)
        rows = np.arange(batch)
        for order, place, span in zip(layout.shape, places, layout.spans(batch), strict=True):
            first, middle, end = span
            layout.numbers[first + ((rows + 1) * len(order) - 1) * FIELDS + 2] += self.count
            layout.numbers[middle:end] = np.array(place, dtype=np.int32).reshape(-1)
        return layout

    def build(self, layout: Layout) -> None:
        """Allocate the state in device memory, and make each layer's view of it; earlier recordings become invalid.

        Raises:
            NotServed: a layer cannot be served by a recorded pass.
        """
        batch = len(self.tokens)
        with torch.inference_mode(False):
            self.state = torch.zeros(len(layout.numbers), dtype=torch.int32, device=self.device)
        self.layers, tables = [], Twins(self.state, self.cache.kv_layers)
        self.twins = [tables]
        views = zip(self.cache.kv_layers, layout.shape, layout.counts, layout.spans(batch), strict=True)
        for layer, order, counts, (first, middle, last) in views:  # a table of phases, then places from `middle` on
            fused.check_plain_causal(layer, None, self.count, expected(layer) + self.count)
            state = tables.on(layer.device)
            table = state[first:middle].view(batch, len(order), FIELDS)
            work = assembled(layer, order, counts, table, self.upper)
            if layer.method.observe_steps:
                work.received = phases.receiving(layer, self.count)
            places, sent = (x[middle:last].view(batch, 2) for x in (state, self.state))
            self.layers.append(Place(layer, work, places, sent))
        self._layout = layout
        self.version += 1

    # -- the device's part ------------------------------------------------------------------------------------------

    def serve(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, logits: Logits = PLAIN) -> Tensor:
        """Append the new tokens to one layer of the cache, and return their attention to all tokens in that layer.

        The model calls this method instead of its own attention, once per layer and in the order of the layers. The
        layer is not an argument: each call is for the layer after that of the previous call.

        Args:
            query: queries of the new tokens, ``[B, Hq, q, D]``.
            key: keys of the new tokens as the layer stores them, ``[B, H, q, D]``.
            value: values of the new tokens, ``[B, H, q, Dv]``.
            logits: the model's softcap and attention sinks; they must be the same in every pass.

        Returns:
            The output of attention, ``[B, q, Hq, Dv]``.

        Raises:
            NotServed: no kernel can compute the attention of the layer.
        """
        place = self.layers[self._turn]
        self._turn += 1
        if place.kernel is None:
            wanted = self.cache.options.kernels
            if wanted == "reference":
                raise NotServed("runtime.kernels=reference")
            place.work.logits = logits
            place.kernel = fused.pick(query, place.work, wanted)
            place.layer.paths.update(fused.label(place.kernel[0], place.work))
        key_store, value_store = place.layer.stores()
        packed = place.layer.packed_at_once()
        transforms = place.layer.transforms()
        if packed is None and query.is_cuda and transforms != (None, None):
            # one launch, which also appends
            buffers = key_store.tail.buffer, value_store.tail.buffer
            query, _, _ = rotate(query, key, value, *transforms, *buffers, place.places)
        else:
            query, (key, value) = place.layer.rotated_queries(query), place.layer.rotated(key, value)
            if packed is not None:
                at_once.pack_new_tokens(packed, key, value, place.places)
            else:
                append(key, value, key_store.tail.buffer, value_store.tail.buffer, place.places)
        with torch.cuda.device_of(query):  # kernels are launched on the current device
            return place.layer.restored(place.kernel[1].attend(query, place.work, scaling))


#: lengths and starts of a segment that takes new tokens, and the address of its buffer
Tail = tuple[tuple[int, ...], tuple[int, ...], int]


def tails(cache: KVCache) -> list[Tail]:
    """Return the state of the segments of a cache that take new tokens."""
    segments = [store.tail for layer in cache.kv_layers for store in layer.stores()]
    return [(tuple(one.lengths), tuple(one.starts), one.buffer.data_ptr()) for one in segments]


def settle(cache: KVCache) -> None:
    """Let the method pack or drop tokens before a pass, without waiting for the device.

    Raises:
        NonFiniteError: the method packed NaN or Inf in an earlier step.
    """
    cache.progress.watches.poll()
    sliding = any(layer.window is not None for layer in cache.kv_layers)
    # tokens that leave a sliding window move the codes of others, which must have been written by then
    deferred = cache.method.packs_together and not sliding
    with packing_together(cache.progress.packs) if deferred else nullcontext():
        if cache.method.settles or sliding:
            cache.settle_layers()


__all__ = ["STATES", "Recorded", "Step", "settle"]


class Step(Recorded):
    """A decode step of one token per row that can be recorded; the tokens that it chooses are its next input.

    Args:
        token: last token of each row, not cached yet, ``[B]``.
        lengths: number of cached tokens of each row, ``[B]``; this is also the position of `token`.
        uniforms: random numbers with which to draw the tokens of all steps, fp32 ``[steps, B]``; None for greedy
            decoding.
    """

    observed = True

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        token: Tensor,
        lengths: Tensor,
        sampling: Sampling,
        uniforms: Tensor | None = None,
    ) -> None:
        super().__init__(model, cache, len(token), 1, token.device)
        self.sampling = sampling
        with torch.inference_mode(False):
            self.number = torch.zeros(1, dtype=torch.long, device=self.device)
            self.uniforms = None if uniforms is None else uniforms.to(self.device)
        self.begin(token, lengths)

    def changed(self) -> list[Tensor]:
        """See :meth:`Recorded.changed`."""
        return [*super().changed(), self.number]

    def run(self) -> None:
        """Run the forward pass, choose the next token of each row, and make it the input of the next run."""
        logits = self.forward(logits_to_keep=1)[:, -1]
        if self.uniforms is None:
            token = logits.argmax(-1)
        else:
            uniform = self.uniforms.index_select(0, self.number)[0]
            token = pick_tokens(probabilities(logits, self.sampling), uniform)
        self.tokens.copy_(token[:, None])
        self.positions.add_(1)
        self.number.add_(1)
