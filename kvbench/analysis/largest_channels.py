"""``python -m kvbench.analysis outliers``: how far the largest channels of keys and values stand above the others.

If the channels of a token share a scale, a much larger channel costs the others their precision. Keys are
measured before RoPE, because RoPE mixes the two channels of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.analysis.analyse import Text
from kvbench.models.load import LoadedModel
from kvbench.models.projections import attentions, head_dim, key_source, value_source

#: factors of ``model.outliers``, and the ratio up to which a model is like one with them. A factor multiplies channels
#: of any size, so it raises the largest ratio less: on `tiny` 64 raises it from 9 to 122
ROWS = ((1, 16.0), (4, 32.0), (16, 64.0), (64, float("inf")))
#: a layer has outliers of its own if its ratio is this many times that of the median layer
_ABOVE = 3.0
PAGE = "docs/which-format.md#a-model-with-outliers"


@dataclass(frozen=True)
class Ratio:
    """The largest channel of a layer's keys or values.

    Args:
        ratio: root mean square of the channel over tokens, divided by that of the median channel of its head.
    """

    ratio: float
    head: int
    channel: int


@dataclass(frozen=True)
class Layer:
    """The largest channel of a layer's keys, and that of its values."""

    keys: Ratio
    values: Ratio


@torch.inference_mode()
def channel_ratios(loaded: LoadedModel, prompts: Sequence[Text]) -> list[Layer]:
    """Run a model on prompts, and return the largest channels of each attention layer over all tokens.

    Raises:
        ModelError: the model has no projection of keys that can be observed.
    """
    model, channels = loaded.model, head_dim(loaded.model)
    modules = attentions(model)
    squares: dict[tuple[int, str], Tensor] = {}
    hooks = []
    for place, module in enumerate(modules):
        for side, source in (("keys", key_source(model, module)), ("values", value_source(model, module))):

            def add(_: object, __: object, out: Tensor, place: int = place, side: str = side, source=source) -> None:  # type: ignore[no-untyped-def]
                total = source.cut(out, channels).double().square().sum((0, 2))
                squares[place, side] = squares.get((place, side), 0) + total

            hooks.append(source.module.register_forward_hook(add))
    try:
        for prompt in prompts:
            model.base_model(torch.tensor([prompt.ids], device=loaded.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [Layer(_ratio(squares[place, "keys"]), _ratio(squares[place, "values"])) for place in range(len(modules))]


def _ratio(squares: Tensor) -> Ratio:
    """Return the largest channel, given the sum of the squares of each channel over all tokens, ``[H, D]``."""
    size = squares.sqrt()
    ratios = size / size.median(dim=-1, keepdim=True).values.clamp(min=torch.finfo(size.dtype).tiny)
    place = int(ratios.argmax())
    head, channel = divmod(place, ratios.shape[-1])
    return Ratio(float(ratios.flatten()[place]), head, channel)


def channel_page(name: str, layers: Sequence[Layer], tokens: int) -> str:
    """Return a markdown table of a model's layers, followed by the :func:`verdict` on its keys and on its values."""
    lines = [
        f"{name}: largest channel over the median channel of its head, root mean squares over {tokens} tokens",
        "",
        "| layer | keys | head, channel | values | head, channel |",
        "|--:|--:|--:|--:|--:|",
    ]
    for place, layer in enumerate(layers):
        cells = [f"{side.ratio:.1f} | {side.head}, {side.channel}" for side in (layer.keys, layer.values)]
        lines.append(f"| {place} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(verdict(layers, side) for side in ("keys", "values")), ""])


def verdict(layers: Sequence[Layer], side: str) -> str:
    """Return a sentence on the ratios of a model's `side`, keys or values, over all layers.

    It names the row of the table in :data:`PAGE` whose ratios are similar.
    """
    ratios = [getattr(layer, side).ratio for layer in layers]
    largest, middle = max(ratios), float(torch.tensor(ratios).median())
    own = [place for place, ratio in enumerate(ratios) if ratio > _ABOVE * middle]
    where = f"in layers {', '.join(map(str, own))}" if own else "in all layers alike"
    factor = next(factor for factor, most in ROWS if largest <= most)
    return f"{side}: up to {largest:.1f} times the median channel, {where}: row {side}, factor {factor} ({PAGE})"
