"""The model's output head, applied to final hidden states in fp32, and predictions compared position by position.

A KV-cache method changes no weights, so a final hidden state (after the last norm) determines a prediction completely:
the logits are the head times that state. Two caches are therefore compared by their final states. The head is applied
to both in fp32, because logits in 16 bits differ more by rounding than an 8-bit cache changes them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.errors import ModelError
from kvbench.metrics.fidelity import TOP, Positions, compare_as_llamacpp

Statistics = Literal["exact", "llamacpp"]

#: largest number of logits that are computed at a time: less than 1 GiB in float64, however long the answer is
LOGITS = 2**24
#: largest difference between the model's own logits and the head's, relative to the largest logit, by dtype
CLOSE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


@dataclass(frozen=True)
class Comparison:
    """Comparison of the predictions of two caches at each of n positions; the base is the full-precision cache.

    Args:
        positions: KL divergence, change of the true token's probability, and so on, at each position.
        gap: log-probability of the base's most probable token minus that of the second most probable one, in nats,
            ``[n]``.
        top: the base's most probable token, ``[n]``.
    """

    positions: Positions
    gap: NDArray[np.float64]
    top: NDArray[np.int64]


class Head:
    """A model's output head in fp32: from final hidden states to logits, with the model's scaling and softcap.

    Raises:
        ModelError: the head is not a matrix of floating-point weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        module: Any = model.get_output_embeddings()
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2 or not weight.is_floating_point():
            raise ModelError(
                f"{type(model).__name__}: the output head is not a matrix of floating-point weights, so it cannot be "
                "applied in fp32.\n  hint: use weights whose head has 16 bits (model.weights=int4 keeps it so)"
            )
        config: Any = model.config.get_text_config(decoder=True)
        bias = getattr(module, "bias", None)
        self.weight = weight.detach().float()
        self.bias = None if bias is None else bias.detach().float()
        self.factor = 1.0
        if getattr(config, "logit_scale", None):  # Cohere
            self.factor = float(config.logit_scale)
        elif getattr(config, "logits_scaling", None):  # Granite
            self.factor = 1.0 / float(config.logits_scaling)
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma
        self.dtype = weight.dtype
        self.name = type(model).__name__

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of final hidden states ``[n, d]`` in fp32, ``[n, V]``."""
        logits = torch.nn.functional.linear(states.to(self.weight.device).float(), self.weight, self.bias)
        logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def check(self, states: Tensor, logits: Tensor) -> None:
        """Raise ModelError unless final states ``[n, d]`` give the logits ``[n, V]`` that the model gave.

        They differ if the model does more with its final states than this class does.
        """
        own, given = self.logits(states), logits.float()
        difference = float((own - given).abs().max())
        limit = CLOSE.get(self.dtype, 0.05) * max(1.0, float(given.abs().max()))
        if not difference <= limit:
            raise ModelError(
                f"{self.name}: its logits differ by up to {difference:.3g} from the output head times the final hidden "
                "states, so the model does more with these than kvbench knows of"
            )

    def compare(self, base: Tensor, candidate: Tensor, target: Tensor, statistics: Statistics = "exact") -> Comparison:
        """Compare the predictions of two caches, in float64.

        Args:
            base: final hidden states with the full-precision cache, ``[n, d]``.
            candidate: those with the other cache at the same positions, ``[n, d]``.
            target: the token that follows at each position, ``[n]``.
            statistics: ``exact``, or ``llamacpp`` for the rounding of llama.cpp
                (:func:`kvbench.metrics.fidelity.compare_as_llamacpp`).
        """
        step = max(1, LOGITS // self.weight.shape[0])
        parts = []
        for first in range(0, len(target), step):
            part = slice(first, first + step)
            parts.append(
                compare_logits(self.logits(base[part]), self.logits(candidate[part]), target[part], statistics)
            )
        if not parts:
            none = np.zeros(0)
            empty = np.zeros(0, dtype=np.int64)
            return Comparison(Positions(none, none, none.astype(bool), none, none, none), none, empty)
        return Comparison(
            Positions(*(np.concatenate([getattr(p.positions, name) for p in parts]) for name in _FIELDS)),
            np.concatenate([p.gap for p in parts]),
            np.concatenate([p.top for p in parts]),
        )


_FIELDS = ("kld", "change", "same_top", "nll_base", "nll", "top_mass")


def compare_logits(base: Tensor, candidate: Tensor, target: Tensor, statistics: Statistics = "exact") -> Comparison:
    """Compare two tensors of logits ``[n, V]`` in float64; the other arguments are those of :meth:`Head.compare`.

    The result is that of :func:`kvbench.metrics.fidelity.compare`, computed on the device of the logits.
    """
    home = torch.device("cpu") if base.device.type == "mps" else base.device  # which has no float64
    p, q = (torch.log_softmax(logits.to(home).double(), -1) for logits in (base, candidate))
    true = target.to(home)[:, None]
    most, top = p.topk(min(TOP, p.shape[-1]), -1)
    if statistics == "llamacpp":
        positions = compare_as_llamacpp(base.cpu().numpy(), candidate.cpu().numpy(), target.cpu().numpy())
    else:
        weight = p.exp()
        kld = torch.where(weight > 0, weight * (p - q), 0.0).sum(-1)
        ln_p, ln_q = p.gather(-1, true)[:, 0], q.gather(-1, true)[:, 0]
        change = ln_q.exp() - ln_p.exp()
        kept = torch.minimum(most, q.gather(-1, top)).exp().sum(-1) / most.exp().sum(-1)
        same = base.to(home).argmax(-1) == candidate.to(home).argmax(-1)
        positions = Positions(*(x.cpu().numpy() for x in (kld, change, same, -ln_p, -ln_q, kept)))
    return Comparison(positions, (most[:, 0] - most[:, 1]).cpu().numpy(), top[:, 0].cpu().numpy())


def digests(model: PreTrainedModel) -> dict[str, str]:
    """Return the SHA-256 of the output head and of the last norm, by the names ``head`` and ``norm``.

    The last norm is taken to be all parameters of the model that belong neither to a layer nor to an embedding.
    """
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    inside = {id(p) for module in (head, embedding) for p in module.parameters()}
    rest = [
        parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in inside and not any(part.isdigit() for part in name.split("."))
    ]
    return {"head": _sha256(list(head.parameters())), "norm": _sha256(rest)}


def _sha256(parameters: list[Any]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(f"{parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
