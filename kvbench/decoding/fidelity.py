"""Decoding of given tokens one at a time through a cache, and the model's final hidden state at each position.

The states are captured where the output head receives them, by a forward pre-hook on the output embeddings. On a GPU
the steps are replays of a CUDA graph, where that is possible; the hook then runs while the graph is recorded, and each
replay writes its state to a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.graphs import Captured
from kvbench.decoding.passes import Rows, check_cache, forward, prefill
from kvbench.decoding.perplexity import simulated_logits
from kvbench.decoding.recordable import Graphs, NotCaptured, eager_reason
from kvbench.decoding.recorded import Recorded
from kvbench.errors import ModelError

#: called before a step with its number, counted from 1, and the cache
Before = Callable[[int, KVCache], None]
#: number of captured steps between two reports of progress, each of which waits for the device
REPORTED = 256


class FinalStates:
    """Recorder of the final hidden states that a model hands to its output head, inside a ``with`` block.

    Attributes:
        taken: the states of each forward pass in the block, ``[B, n, d]`` each, until :meth:`clear`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.taken: list[Tensor] = []
        self._model = model

    def __enter__(self) -> FinalStates:
        head: Any = self._model.get_output_embeddings()
        self._hook = head.register_forward_pre_hook(self._take)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()

    def _take(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self.taken.append(inputs[0])

    def clear(self) -> None:
        """Forget the states of the passes so far."""
        self.taken.clear()

    def last(self, batch: int) -> Tensor:
        """Return the states of the newest passes that together have `batch` rows, ``[batch, n, d]``; then forget all.

        A prefill may take several passes: over groups of rows, or over chunks of a prompt; only the states of the last
        chunk are returned.

        Raises:
            ModelError: the model did not call its output head.
        """
        parts: list[Tensor] = []
        while self.taken and sum(map(len, parts)) < batch:
            parts.insert(0, self.taken.pop())
        self.clear()
        if sum(map(len, parts)) != batch:
            raise ModelError(
                f"{type(self._model).__name__} did not hand final hidden states to its output embeddings, so they "
                "cannot be recorded"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.inference_mode()
def follow(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    mask: Tensor | None,
    tokens: Tensor,
    *,
    prefill_chunk: int | None = None,
    prefill_rows: Rows = "auto",
    graphs: Graphs = "never",
    compile: bool = False,
    before: Before | None = None,
    report: Callable[[int], None] | None = None,
    capture: bool = True,
) -> tuple[Tensor, Tensor]:
    """Prefill prompts, decode given tokens one at a time, and return the final hidden state at each position.

    Position 0 is the last token of the prompt, whose state comes from the prefill; position k is the k-th given token.

    Arguments that are not listed are those of :func:`kvbench.decoding.autoregressive.generate`.

    Args:
        tokens: tokens to decode after the prompts, ``[B, n]``.
        before: called before each step, for tests that change the cache; steps are then eager.
        report: called from time to time with the number of tokens decoded so far.
        capture: True: capture a CUDA graph; False: run the code of a step at each replay (for tests on a CPU).

    Returns:
        The states, ``[B, n + 1, d]`` in the model's dtype, and the model's own logits of position 0, ``[B, V]``.

    Raises:
        CacheError: the model did not use the cache.
        ModelError: the model does not hand its final hidden states to its output embeddings.
        NonFiniteError: the logits after a prompt contain NaN or +Inf.
    """
    batch, width = input_ids.shape
    steps = tokens.shape[1]
    with FinalStates(model) as final:
        logits = prefill(model, cache, input_ids, mask, prefill_chunk, prefill_rows)
        first = final.last(batch)[:, -1]
        states = first.new_empty(batch, steps + 1, first.shape[-1])
        states[:, 0] = first
        lengths = torch.full((batch,), width, device=input_ids.device) if mask is None else mask.sum(-1)
        eager = before is not None or not steps
        refused = eager or (capture and eager_reason(model, cache, graphs, steps, input_ids.device) is not None)
        wanted = not refused and (capture or graphs != "never")
        if not (wanted and _replayed(model, cache, tokens, lengths, states, final, compile, capture, report)):
            for number in range(steps):
                if before is not None:
                    before(number + 1, cache)
                if mask is not None:
                    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                forward(model, cache, tokens[:, number : number + 1], mask, (lengths + number)[:, None])
                states[:, number + 1] = final.last(batch)[:, -1]
                if report is not None:
                    report(number + 1)
    check_cache(cache, width + steps)
    return states, logits


@torch.inference_mode()
def simulate(model: PreTrainedModel, cache: KVCache, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the final hidden states of a text in one pass with simulated quantization, and the logits of token 0.

    The states are ``[B, T, d]``; the logits are the model's own, ``[B, V]``. The text ``[B, T]`` has no padding.
    """
    with FinalStates(model) as final:
        logits = simulated_logits(model, cache, ids)[:, 0]
        return final.last(len(ids)), logits


class Followed(Recorded):
    """A step of one given token per row that can be recorded as a CUDA graph, and that stores its final hidden state.

    Args:
        tokens: token ids to decode, ``[B, n]``.
        lengths: number of cached tokens of each row, without padding, ``[B]``.
        states: a tensor with the shape and dtype of all states, ``[B, n + 1, d]``; not written. Step k writes
            ``self.states[:, k]``.
        final: recorder of the states, whose ``with`` block is open.
    """

    observed = True

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        tokens: Tensor,
        lengths: Tensor,
        states: Tensor,
        final: FinalStates,
    ) -> None:
        super().__init__(model, cache, len(tokens), 1, tokens.device)
        with torch.inference_mode(False):
            self.given = tokens.clone()
            self.number = torch.zeros(1, dtype=torch.long, device=tokens.device)
            self.states = torch.empty_like(states)
        self.final = final
        self.begin(self.given[:, 0], lengths)

    def changed(self) -> list[Tensor]:
        """See :meth:`Recorded.changed`."""
        return [*super().changed(), self.number]

    def run(self) -> None:
        """Run the forward pass, store its final hidden state, and make the next given token the next input."""
        self.forward(logits_to_keep=1)
        state = self.final.last(len(self.given))[:, -1:]
        self.number.add_(1)
        self.states.index_copy_(1, self.number, state.to(self.states.dtype))
        following = self.number.clamp(max=self.given.shape[1] - 1)  # after the last step, nothing is fed
        self.tokens.copy_(self.given.index_select(1, following))
        self.positions.add_(1)


def _replayed(
    model: PreTrainedModel,
    cache: KVCache,
    tokens: Tensor,
    lengths: Tensor,
    states: Tensor,
    final: FinalStates,
    compile: bool,
    capture: bool,
    report: Callable[[int], None] | None,
) -> bool:
    """Decode all tokens by replays of a captured step and store their states; return False if none can be captured."""
    step = Followed(model, cache, tokens, lengths, states, final)
    captured = Captured(step, compile=compile, capture=capture)
    try:
        captured.first()
    except NotCaptured:
        final.clear()
        return False
    count = tokens.shape[1]
    for number in range(count):
        if number:
            captured.next()
        captured.replay()
        if report is not None and (number % REPORTED == REPORTED - 1 or number == count - 1):
            report(number + 1)
    states[:, 1:] = step.states[:, 1:]
    return True
