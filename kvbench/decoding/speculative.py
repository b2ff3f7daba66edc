"""Speculative decoding with one model: gamma drafts, one verification of gamma + 1 tokens, rollback by length.

Source: Tiwari et al., "QuantSpec" (2025), Algorithm 1. Where its text leaves details open, this implementation packs
confirmed tokens only, and between rounds; verifies with gamma + 1 distributions; lets rows of a batch accept different
numbers of tokens; and handles an end-of-sequence token among the drafts.

Acceptance. Greedy: the longest prefix that the target would have chosen itself. Sampled: Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding" (2023), Algorithm 1: a draft g, drawn from the distribution q, is
accepted with probability min(1, p(g)/q(g)), where p is the target's distribution; after a rejection the token is drawn
from norm(max(p - q, 0)). Given what the cache holds in each round, greedy output thus equals the target's own, and
sampled output has its distribution. But tokens are packed between rounds, so not at the same points of the text as
without drafts (gamma = 0); for this reason alone, the output may differ from that of decoding without drafts. To check
this, :func:`replay` decodes without drafts and packs at the same points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.drafting import Drafter, draw_tokens
from kvbench.decoding.passes import check_cache, forward, now, prefill
from kvbench.decoding.round_times import Gamma, Round
from kvbench.decoding.sampling import Sampling, Stopping, probabilities
from kvbench.methods.speculation import Speculation


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


class Engine(ABC):
    """Runner of the rounds of speculation: drafts tokens, verifies them, and rolls back the rejected ones."""

    @property
    def seconds(self) -> float:
        """Seconds spent on capturing forward passes so far; the times of the rounds do not include them."""
        return 0.0

    @abstractmethod
    def begin(self, token: Tensor) -> None:
        """Prepare for the first round with the first new token of each row, ``[B]``, which is not cached yet."""

    @abstractmethod
    def round(
        self,
        gamma: int,
        active: list[bool],
        limits: list[int],
        stopping: Stopping,
        generators: Sequence[torch.Generator],
    ) -> Round:
        """Run one round: draft, verify, accept and roll back.

        Args:
            gamma: number of drafts.
            active: which rows still generate.
            limits: number of drafts that each row may accept.

        Returns:
            The round. An engine may fill in the times of its parts only during the next round, or in :meth:`end`.
        """

    def end(self) -> None:
        """Complete the bookkeeping of the last round."""
        return


class Eager(Engine):
    """Engine whose forward passes are ordinary calls of the model."""

    def __init__(self, drafter: Drafter, sampling: Sampling, pad_token_id: int) -> None:
        self.drafter, self.sampling, self.pad = drafter, sampling, pad_token_id

    def begin(self, token: Tensor) -> None:
        """See :meth:`Engine.begin`."""
        self.pending = token

    def round(
        self,
        gamma: int,
        active: list[bool],
        limits: list[int],
        stopping: Stopping,
        generators: Sequence[torch.Generator],
    ) -> Round:
        """Run one round; see :meth:`Engine.round`. The times of its parts include waiting for the device."""
        drafter, sampling, forced = self.drafter, self.sampling, self.drafter.speculation.forced
        cache, started = drafter.target, now(self.pending)
        pending = self.pending.masked_fill(~torch.tensor(active, device=self.pending.device), self.pad)
        cache.settle()
        drafter.settle()
        starts = cache.progress.padding.starts or [0] * len(active)
        settled = [cache.get_seq_length() - start for start in starts]
        lengths = torch.tensor(settled, device=pending.device)
        mask = left_padding(starts, cache.get_seq_length() + max(limits) + 1, pending.device)

        flushed = now(pending)
        drafts, chances = drafter.propose(pending, mask, lengths, limits, sampling, generators)
        steps, drafted_at = drafts.shape[1], now(drafts)
        logits = drafter.verify(torch.cat([pending[:, None], drafts], 1), lengths, mask)
        verified = now(logits)

        uniforms = torch.ones(drafts.shape)
        if forced is not None or sampling.temperature:
            for row, limit in enumerate(limits):  # drafts beyond the limit must not be accepted
                uniforms[row, :limit] = torch.rand(limit, generator=generators[row])
        bounds, uniforms = torch.tensor(limits, device=pending.device), uniforms.to(pending.device)
        if sampling.temperature == 0.0:
            accepted, following = accept_greedy(drafts, logits.argmax(-1), bounds, chance(uniforms, forced))
        else:
            target = probabilities(logits, sampling)
            proposed = target[:, :0] if chances is None else chances  # None: there are no drafts
            accepted, rest = accept_sampled(drafts, proposed, target, uniforms, bounds, chance(uniforms, forced))
            following = draw_tokens(rest, generators, active)

        emitted = taken(stopping, active, accepted.tolist(), drafts.tolist(), following.tolist())
        # The cache keeps the pending token and the drafts up to a row's last new token, which is the next pending one.
        cache.take_back([steps + 1 - count for count in emitted])
        drafter.confirm(emitted)
        self.pending = following
        return Round(
            now(following) - started,
            settled,
            limits,
            accepted.tolist(),
            emitted,
            draft_seconds=drafted_at - flushed,
            verify_seconds=verified - drafted_at,
            flush_seconds=flushed - started,
        )


@torch.inference_mode()
def speculative_decode(
    model: PreTrainedModel,
    cache: KVCache,
    token: Tensor,
    stopping: Stopping,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    max_new_tokens: int,
    pad_token_id: int,
    speculation: Speculation,
    engine: Engine | None = None,
) -> list[Round]:
    """Decode speculatively until every row has ended, and return counts and time of each round.

    A row's tokens and random numbers do not depend on the other rows of the batch, except with ``gamma=auto``.

    Arguments are those of :func:`kvbench.decoding.autoregressive.continued`; no row accepts drafts beyond its limit of
    new tokens. `cache` is the target's. Without an engine, rounds are run by a new :class:`Eager`.

    Raises:
        CacheError: the model did not use the cache, or the draft needs a cache of its own and has none.
    """
    engine = engine or Eager(Drafter(model, cache, speculation), sampling, pad_token_id)
    chooser = Gamma(speculation.choices) if speculation.gamma == "auto" else None
    stopping.take(token.tolist())
    left = [max_new_tokens - 1] * len(token)
    rounds: list[Round] = []
    gammas: list[int] = []
    width = cache.get_seq_length()
    engine.begin(token)
    while any(n and not ended for n, ended in zip(left, stopping.ended, strict=True)):
        active = [n > 0 and not ended for n, ended in zip(left, stopping.ended, strict=True)]
        gamma = speculation.most if chooser is None else chooser.next()
        limits = [min(gamma, n - 1) if on else 0 for n, on in zip(left, active, strict=True)]
        rounds.append(engine.round(gamma, active, limits, stopping, generators))
        gammas.append(gamma)
        if chooser is not None and len(rounds) > 1:  # the times of the last round may not be known yet
            earlier = rounds[-2]
            times = earlier.draft_seconds, earlier.verify_seconds
            chooser.record(gammas[-2], earlier.drafted, earlier.accepted, *times)
        width += max(rounds[-1].emitted)
        left = [n - count for n, count in zip(left, rounds[-1].emitted, strict=True)]
    engine.end()
    check_cache(cache, width)
    return rounds


def taken(
    stopping: Stopping,
    active: Sequence[bool],
    accepted: Sequence[int],
    drafts: Sequence[Sequence[int]],
    following: Sequence[int],
) -> list[int]:
    """Add each row's new tokens of a round, up to one that ends the row, and return how many each row got.

    Args:
        active: which rows still generated at the beginning of the round.
        accepted: number of drafts that each row accepted.
        following: for each row, the token after the accepted drafts.
    """
    emitted = [0] * len(active)
    for row, on in enumerate(active):
        for new in [*drafts[row][: accepted[row]], following[row]] if on else ():
            if not stopping.ended[row]:
                stopping.take_row(row, new)
                emitted[row] += 1
    return emitted


def left_padding(starts: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    """Return the attention mask ``[B, width]`` of rows that begin in columns `starts`; None if no row has padding."""
    if not any(starts):
        return None
    first = torch.tensor(starts, device=device)
    return (torch.arange(width, device=device)[None] >= first[:, None]).long()


@torch.inference_mode()
def replay(
    model: PreTrainedModel, cache: KVCache, input_ids: Tensor, settled: Collection[int], max_new_tokens: int
) -> tuple[list[int], list[float]]:
    """Repeat a greedy speculative run on one prompt ``[1, T]`` without a draft, token by token.

    Args:
        settled: numbers of cached tokens at which the method packed or dropped tokens in the speculative run
            (``Round.settled``); it does so here at the same numbers only.
        max_new_tokens: number of tokens to generate; end-of-sequence tokens do not end the run.

    Returns:
        The tokens, and for each token the difference between the largest and the second largest logit. If a difference
        is below 1e-4 in fp32, the two tokens are tied, and the speculative run may have chosen the other one.
    """
    scores = prefill(model, cache, input_ids, None)[0]
    cache.progress.frozen = True
    tokens, gaps = [], []
    while True:
        best = scores.topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        if len(tokens) == max_new_tokens:
            return tokens, gaps
        seen = cache.get_seq_length()
        if seen in settled:
            cache.settle()
        position = torch.tensor([[seen]], device=input_ids.device)
        token = torch.tensor([[tokens[-1]]], device=input_ids.device)
        scores = forward(model, cache, token, None, position)[0, -1]
