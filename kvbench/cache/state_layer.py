"""Layers with a state of fixed size (linear attention, Mamba, convolution), and creation of a cache's layers.

The state is transformers' own: kvbench counts its bytes and copies it, and changes nothing about it. It cannot go back
to an earlier token, so a cache with such layers refuses to remove tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvbench.cache.layer import KVLayer
from kvbench.cache.policy import Policy
from kvbench.cache.progress import Progress
from kvbench.errors import CacheError
from kvbench.models.layers import LayerKind


class StateLayer(LinearAttentionLayer):
    """A layer that keeps a state of fixed size in place of keys and values.

    Args:
        place: index of the layer in the model, for messages.
        one_by_one: True if the model cannot continue the state with several tokens at once
            (:data:`kvbench.models.layers.RESTARTING`).
    """

    is_croppable = False
    dtype: Any
    device: Any

    def __init__(self, number_of_states: int = 1, place: int = 0, one_by_one: bool = False) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        self.place_in_model, self.one_by_one = place, one_by_one

    def states(self) -> list[Tensor]:
        """Return the tensors that hold the state, each ``[B, ...]``; none before the first token."""
        return [x for x in (*self.conv_states.values(), *self.recurrent_states.values()) if x is not None]

    def state_bytes(self) -> int:
        """Return the bytes of the state, for the whole batch."""
        return sum(x.untyped_storage().nbytes() for x in self.states())

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Update the state with the convolution's new inputs, ``[B, C, q]``, as transformers' layer does.

        Raises:
            CacheError: the model cannot continue its state with several tokens at once.
        """
        if self.one_by_one and self.has_previous_state[state_idx] and conv_states.shape[-1] > 1:
            raise CacheError(
                f"the model got {conv_states.shape[-1]} tokens at once after its first pass; in transformers' code the "
                f"state of layer {self.place_in_model} starts anew in every pass over several tokens, so results would "
                "be wrong.\n  hint: pass the tokens one by one, as kvbench.decoding.passes.forward does"
            )
        result: Tensor = super().update_conv_state(conv_states, state_idx, **kwargs)
        return result

    def activate_past_recording(self) -> None:
        """Raise CacheError: transformers calls this in assisted generation, so that it can remove tokens later."""
        raise CacheError(no_rollback())

    def crop(self, tokens_to_remove: int) -> None:
        """Raise CacheError if `tokens_to_remove` is not 0."""
        if int(tokens_to_remove):
            raise CacheError(no_rollback())

    def reset(self) -> None:
        """Return to the state before the first token."""
        LinearAttentionLayer.__init__(self, self.number_of_states)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Reorder the rows of the batch; see :meth:`kvbench.cache.KVCache.batch_select_indices`."""
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    states[number] = state.index_select(0, indices.to(state.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies of a row are adjacent."""
        for state in self.states()[:1]:
            self.batch_select_indices(torch.arange(len(state)).repeat_interleave(repeats))

    def take_state(self, source: StateLayer) -> None:
        """Copy the state of the same layer of another cache, which has read the same tokens."""
        for name in ("conv_states", "recurrent_states"):
            setattr(self, name, {i: None if x is None else x.clone() for i, x in getattr(source, name).items()})
        for name in (
            "is_conv_states_initialized",
            "is_recurrent_states_initialized",
            "has_previous_state",
            "conv_kernel_size",
        ):
            setattr(self, name, dict(getattr(source, name)))
        self.dtype, self.device = source.dtype, source.device

    def clone(self, progress: Progress) -> Self:
        """Return an independent copy of the layer; `progress` is not used."""
        twin = copy(self)
        twin.take_state(self)
        return twin


class KVStateLayer(StateLayer, KVLayer):
    """A layer with both attention and a state of fixed size (Falcon-H1, Zamba2).

    The arguments are those of :class:`~kvbench.cache.layer.KVLayer` and :class:`StateLayer`; `index` counts only the
    layers with keys and values, `place` all layers of the model.
    """

    is_compileable = False

    def __init__(
        self,
        method: Policy[KVLayer],
        index: int,
        progress: Progress,
        window: int | None = None,
        *,
        number_of_states: int = 1,
        place: int = 0,
        one_by_one: bool = False,
    ) -> None:
        StateLayer.__init__(self, number_of_states, place, one_by_one)
        KVLayer.__init__(self, method, index, progress, window)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the layer for keys and values (two positional arguments), or its state (keyword arguments)."""
        if args:
            KVLayer.lazy_initialization(self, *args)
        else:
            StateLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Drop all tokens and the state."""
        StateLayer.reset(self)
        KVLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise CacheError if tokens are to be removed (:meth:`kvbench.cache.KVCache.crop`)."""
        if tokens_to_remove < 0 or 0 < tokens_to_remove < self.seen:
            raise CacheError(no_rollback())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Reorder the rows of the batch; see :meth:`kvbench.cache.KVCache.batch_select_indices`."""
        StateLayer.batch_select_indices(self, indices)
        KVLayer.batch_select_indices(self, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies of a row are adjacent."""
        KVLayer.batch_repeat_interleave(self, repeats)

    def clone(self, progress: Progress) -> Self:
        """See :meth:`KVLayer.clone`."""
        twin = KVLayer.clone(self, progress)
        twin.take_state(self)
        return twin


def layers_of(method: Policy[KVLayer], kinds: Sequence[LayerKind], progress: Progress) -> Iterator[Any]:
    """Yield the layers of an empty cache; ``KVLayer.index`` numbers only the layers with keys and values."""
    index = 0
    for place, kind in enumerate(kinds):
        if not kind.attends:
            yield StateLayer(kind.states, place, kind.one_by_one) if kind.states else empty_layer()
            continue
        if kind.states:
            yield KVStateLayer(
                method,
                index,
                progress,
                kind.window,
                number_of_states=kind.states,
                place=place,
                one_by_one=kind.one_by_one,
            )
        else:
            yield KVLayer(method, index, progress, kind.window)
        index += 1


def no_rollback() -> str:
    """Return the text of the error for tokens that are to be removed from a cache with states of fixed size."""
    return (
        "tokens cannot be removed from this cache: the model has layers with a state of fixed size (linear attention, "
        "Mamba or convolution), which cannot go back to an earlier token.\n"
        "  hint: decode without speculation, assistant model and prompt lookup"
    )


def empty_layer() -> Any:
    """Return transformers' stand-in for a layer that keeps nothing, only a feed-forward network (Nemotron-H).

    Older versions of transformers have a layer with an empty state in its place.
    """
    from transformers.cache_utils import DummyLayer

    return DummyLayer()
