"""A method as a user of the package would write it: one file, one YAML.

It evicts half of the prompt, heads keep different halves (even or odd tokens), and it observes attention, so that the
contract covers what the bundled quantizing methods do not use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.methods import Method


@dataclass(kw_only=True)
class EveryOther(Method):
    """Keep every second token of the prompt (by head) and the last `keep_last`."""

    keep_last: int = 16

    observe_prompt: ClassVar[int] = 4
    observe_steps: ClassVar[bool] = True

    def segments(self, layer, side):
        """One full-precision segment."""
        return [self.full(layer, side)]

    def place(self, layer, rows, keys, values, scores):
        """Gather what each head keeps; `scores` is the attention of the last four queries."""
        import torch

        count, heads = keys.shape[2], keys.shape[1]
        assert scores.shape[2:] == (4, count)
        assert torch.allclose(scores.sum(-1), torch.ones_like(scores.sum(-1)), atol=1e-4)
        border = max(0, count - self.keep_last)
        border -= border % 2  # so that every head keeps equally many
        recent = torch.arange(border, count)
        index = torch.stack([torch.cat([torch.arange(h % 2, border, 2), recent]) for h in range(heads)])
        start = layer.start(rows.indices(layer.batch)[0])
        for row in range(*rows.indices(layer.batch)):
            layer.order[row] = index + start
        for store, x in zip(layer.stores(), (keys, values), strict=True):
            store.tail.append(rows, x)
            store.tail.keep(rows, index)

    def observe(self, layer, rows, probabilities):
        """Attention of a step over the slots sums to 1."""
        import torch

        assert probabilities.shape[-1] == layer.stores()[0].length(rows)
        assert torch.allclose(probabilities.sum(-1), torch.ones_like(probabilities.sum(-1)), atol=1e-4)
