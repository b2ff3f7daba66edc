"""Acceptance of drafted tokens, and the distribution of the token that follows them.

Greedy: the longest prefix that the target would have chosen itself is accepted. Sampled: Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding" (2023), Algorithm 1: a draft g, drawn from the distribution q, is
accepted with probability min(1, p(g)/q(g)), where p is the target's distribution; after a rejection the token is drawn
from norm(max(p - q, 0)). The resulting tokens are then distributed according to p.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_greedy(drafts: Tensor, choices: Tensor, limits: Tensor, good: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Accept the drafts before the first one that differs from the token that the target would choose.

    Args:
        drafts: drafted tokens of each row, ``[B, gamma]``.
        choices: tokens that the target would choose after the confirmed text and after each draft, ``[B, gamma + 1]``.
        limits: maximum number of drafts to accept in each row, ``[B]``.
        good: which drafts may be accepted, whatever their tokens (:func:`chance`); None: decided by `choices`.

    Returns:
        The number of accepted drafts of each row ``[B]``, and the target's choice for the token after them ``[B]``.
    """
    accepted = leading(drafts == choices[:, : drafts.shape[1]] if good is None else good, limits)
    return accepted, choices.gather(1, accepted[:, None]).squeeze(1)


def accept_sampled(
    drafts: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    limits: Tensor,
    good: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept drafts at random, in such a way that the resulting tokens have the target's distribution.

    The host does not wait for the device, so the function can be captured in a CUDA graph.

    Args:
        drafts: drafted tokens of each row, ``[B, gamma]``; draft i was drawn from ``draft_probs[:, i]``.
        draft_probs: the draft's distributions q, ``[B, gamma, V]``.
        target_probs: the target's distributions p after the confirmed text and after each draft, ``[B, gamma + 1, V]``.
        uniforms: uniform random numbers u in [0, 1), ``[B, gamma]``; a draft g is accepted if u * q(g) < p(g) and all
            drafts before it are accepted.
        limits: maximum number of drafts to accept in each row, ``[B]``.
        good: as for :func:`accept_greedy`; the token after the drafts then comes from p.

    Returns:
        The number of accepted drafts of each row ``[B]``, and the distribution from which to draw the token after them
        ``[B, V]``. The distribution is p where the limit was reached, and norm(max(p - q, 0)) where a draft was
        rejected.
    """
    gamma, batch = drafts.shape[1], torch.arange(len(drafts), device=drafts.device)
    if good is not None or not gamma:
        accepted = torch.zeros_like(limits) if good is None else leading(good, limits)
        return accepted, target_probs[batch, accepted]
    p = target_probs[:, :gamma].gather(2, drafts[..., None]).squeeze(2)
    q = draft_probs.gather(2, drafts[..., None]).squeeze(2)
    accepted = leading(uniforms * q < p, limits)
    after = target_probs[batch, accepted]
    refused = draft_probs[batch, accepted.clamp(max=gamma - 1)]
    rest = (after - refused).clamp_(min=0.0)
    mass = rest.sum(-1, keepdim=True)
    # if p = q, the rest is 0 and only a rounding error can have caused a rejection: draw from p itself
    rest = torch.where(mass > 0, rest / mass.clamp(min=torch.finfo(rest.dtype).tiny), after)
    return accepted, torch.where((accepted < limits)[:, None], rest, after)


def chance(uniforms: Tensor, forced: float | None) -> Tensor | None:
    """Return which drafts to accept by chance, to measure times at a given acceptance; the text is then meaningless.

    Args:
        uniforms: uniform random numbers in [0, 1), ``[B, gamma]``; 1 for drafts that must not be accepted.
        forced: probability with which each draft is accepted if all before it are; None: not by chance, and the result
            is None.
    """
    return None if forced is None else uniforms < forced


def leading(good: Tensor, limits: Tensor) -> Tensor:
    """Return how many of the drafts ``[B, gamma]`` each row accepts: those before its first bad one, within limits."""
    return torch.minimum(good.long().cumprod(1).sum(1), limits)
