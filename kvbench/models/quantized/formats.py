"""The formats of quantized checkpoints, as the ``quantization_config`` of a config.json describes them.

Does not import torch. kvbench reads two formats itself, both with 4 bits per weight: AWQ in its ``gemm`` layout (Lin et
al., "AWQ: Activation-aware Weight Quantization", 2024) and GPTQ (Frantar et al., "GPTQ: Accurate Post-Training
Quantization", 2023), in the layouts that AutoAWQ, AutoGPTQ and GPTQModel write. Other formats are left to transformers,
except those that would need another package for the same number of bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: bits per weight of the checkpoints that kvbench reads
BITS = 4
#: key of a config.json that describes the format
KEY = "quantization_config"
#: GPTQ layouts, and what to add to a stored zero point: version 1 stores zero points minus one
GPTQ_LAYOUTS = {"gptq": 1, "gptq_v2": 0}
#: name of AWQ's layout that kvbench reads
AWQ_LAYOUT = "gemm"
#: the hint in messages
INSTEAD = "use the unquantized checkpoint with model.weights=int4, which rounds its weights to 4 bits when it is loaded"


@dataclass(frozen=True)
class Format:
    """The format of a checkpoint with 4-bit weights.

    Args:
        method: the algorithm that chose the weights, and with it the layout of the tensors.
        group: number of consecutive input channels that share a scale and a zero point; None: all of them.
        shift: number to add to a stored zero point.
    """

    method: Literal["awq", "gptq"]
    group: int | None
    shift: int = 0


def stored(numbers: Mapping[str, Any]) -> Any:
    """Return the description of quantization in a config.json's content; None if the weights are not quantized."""
    return numbers.get(KEY) or None


def format_of(description: Any) -> Format | None:
    """Return the format of a checkpoint if kvbench reads it itself; None for other formats and other methods.

    :func:`unreadable` must have accepted the description, which is the value of ``quantization_config``.
    """
    if not isinstance(description, Mapping) or unreadable(description):
        return None
    method, group = _lower_text(description, "quant_method"), description.get("group_size", 128)
    group = group if isinstance(group, int) and group > 0 else None
    if method == "awq":
        return Format("awq", group)
    if method == "gptq":
        return Format("gptq", group, GPTQ_LAYOUTS[_layout(description, "checkpoint_format", "format", standard="gptq")])
    return None


def unreadable(description: Any) -> str:
    """Return why a quantized checkpoint is refused, with the remedy; empty if kvbench or transformers can read it.

    The description is the value of ``quantization_config``; None for weights that are not quantized.
    """
    if description is None:
        return ""
    if not isinstance(description, Mapping):
        return f"its {KEY} is not an object, so the format of its weights is unknown; {INSTEAD}"
    method = _lower_text(description, "quant_method")
    if method == "bitsandbytes" or description.get("load_in_4bit") or description.get("load_in_8bit"):
        return f"its weights are in the format of bitsandbytes, which kvbench does not read; {INSTEAD}"
    if method not in ("awq", "gptq"):
        return ""
    name = method.upper()
    bits = description.get("bits", description.get("w_bit", BITS))
    if str(bits) != str(BITS):
        return f"its weights are {name} with {bits} bits, but kvbench reads {name} with {BITS} bits; {INSTEAD}"
    if description.get("desc_act") or description.get("act_group_aware"):
        return (
            f"its weights are {name} in act-order (desc_act), in which the channels of a group are not consecutive; "
            f"choose a checkpoint with desc_act=false, or {INSTEAD}"
        )
    changed = [str(rule) for rule in description.get("dynamic") or () if not str(rule).startswith("-:")]
    if changed:
        return f"its weights are {name} with other settings for some layers (dynamic: {changed[0]}); {INSTEAD}"
    if method == "awq":
        layout = _layout(description, "version", "checkpoint_format", "format", standard=AWQ_LAYOUT)
        allowed: tuple[str, ...] = (AWQ_LAYOUT,)
    else:
        layout = _layout(description, "checkpoint_format", "format", standard="gptq")
        layout = "marlin" if description.get("is_marlin_format") else layout
        allowed = tuple(GPTQ_LAYOUTS)
    if layout not in allowed:
        return (
            f"its weights are {name} in the layout {layout}, but kvbench reads {name} in the layout "
            f"{' or '.join(allowed)}; choose a checkpoint in that layout, or {INSTEAD}"
        )
    return ""


def _layout(description: Mapping[str, Any], *keys: str, standard: str) -> str:
    """Return the layout of the packed weights, such as ``gemm``: the value of the first set key, or else `standard`."""
    return next((_lower_text(description, key) for key in keys if description.get(key)), standard)


def _lower_text(description: Mapping[str, Any], key: str) -> str:
    return str(description.get(key) or "").lower()
