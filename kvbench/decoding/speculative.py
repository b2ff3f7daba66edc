"""Speculative decoding with one model: gamma drafts, one verification of gamma + 1 tokens, rollback by length.

Source: Tiwari et al., "QuantSpec" (2025), Algorithm 1. Where its text leaves details open, this implementation flushes
the buffer between rounds and of confirmed tokens only, verifies with gamma + 1 distributions, lets rows of a batch
accept different numbers of tokens, and handles an end-of-sequence token among the drafts. Drafts are accepted by
:mod:`kvbench.decoding.acceptance`: greedy output equals the target's own, sampled output has its distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.acceptance import accept_greedy, accept_sampled
from kvbench.decoding.drafting import Drafter, draw
from kvbench.decoding.passes import check_cache, now
from kvbench.decoding.sampling import Sampling, probabilities
from kvbench.decoding.stopping import Stopping
from kvbench.methods.speculation import Speculation


@dataclass
class Round:
    """Counts and time of one round of speculation, for all rows of a batch.

    Args:
        seconds: duration of the round: drafting, verification and rollback.
        settled: number of cached tokens of each row at the beginning of the round. At this point the method has just
            packed or dropped tokens.
        drafted: maximum number of drafts that each row was allowed to accept; 0 if the row had ended or only one token
            was left until its limit.
        accepted: number of drafts that each row accepted.
        emitted: number of tokens that each row gained, the end-of-sequence token included.
        draft_seconds: duration of all drafts of the round; None: not measured apart.
        verify_seconds: duration of the verification; None: not measured apart.
        flush_seconds: duration of packing or dropping tokens before the round; None: not measured apart.
    """

    seconds: float
    settled: list[int]
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    flush_seconds: float | None = None


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    cache: KVCache,
    token: Tensor,
    stopping: Stopping,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    max_new_tokens: int,
    pad_token_id: int,
    speculation: Speculation,
    drafter: Drafter | None = None,
) -> list[Round]:
    """Decode speculatively until every row has ended, and return counts and time of each round.

    A row's tokens and random numbers do not depend on the other rows of the batch.

    Args:
        model: causal language model that runs kvbench's attention: the target.
        cache: the target's cache, which already contains the prompts.
        token: first new token of each row, ``[B]``; not cached yet.
        stopping: object to which the new tokens are added, and which decides when a row has ended.
        sampling: how tokens are chosen: temperature, top-k and top-p.
        generators: random generator of each row.
        max_new_tokens: limit on the new tokens of every row, the first token included; no row accepts drafts beyond it.
        pad_token_id: token fed to rows that have ended.
        speculation: settings of speculative decoding.
        drafter: object that runs draft and target; None: a new :class:`Drafter`, whose passes are eager.

    Returns:
        The rounds, in order. The tokens themselves are in `stopping`.

    Raises:
        CacheError: the model did not use the cache, or the draft needs a cache of its own and has none.
    """
    drafter = drafter or Drafter(model, cache, speculation)
    stopping.take(token.tolist())
    left = [max_new_tokens - 1] * len(token)
    rounds: list[Round] = []
    width = cache.get_seq_length()
    while any(n and not ended for n, ended in zip(left, stopping.ended, strict=True)):
        active = [n > 0 and not ended for n, ended in zip(left, stopping.ended, strict=True)]
        limits = [min(speculation.most, n - 1) if on else 0 for n, on in zip(left, active, strict=True)]
        started, recorded = now(token), drafter.seconds
        token = token.masked_fill(~torch.tensor(active, device=token.device), pad_token_id)
        token, done = _round(drafter, token, active, limits, stopping, sampling, generators)
        done.seconds = now(token) - started - (drafter.seconds - recorded)
        rounds.append(done)
        width += max(done.emitted)
        left = [n - count for n, count in zip(left, done.emitted, strict=True)]
    check_cache(cache, width)
    return rounds


def _round(
    drafter: Drafter,
    pending: Tensor,
    active: list[bool],
    limits: list[int],
    stopping: Stopping,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> tuple[Tensor, Round]:
    """Run one round: draft, verify, accept and roll back.

    Args:
        drafter: proposes and verifies the drafts.
        pending: last confirmed token of each row, not cached yet, ``[B]``.
        active: which rows still generate.
        limits: number of drafts that each row may accept.
        stopping: collects the tokens and decides which rows have ended.
        sampling: how tokens are chosen: temperature, top-k and top-p.
        generators: random generator of each row.

    Returns:
        The next pending token of each row ``[B]``, and the round, with its seconds still 0.
    """
    cache, steps = drafter.target, drafter.drafts(limits)
    cache.settle()
    drafter.settle()
    starts = cache.progress.padding.starts or [0] * len(active)
    settled = [cache.get_seq_length() - start for start in starts]
    lengths = torch.tensor(settled, device=pending.device)
    mask = left_padding(starts, cache.get_seq_length() + steps + 1, pending.device)

    drafts, chances = drafter.propose(pending, mask, lengths, limits, sampling, generators)
    logits = drafter.verify(torch.cat([pending[:, None], drafts], 1), lengths, mask)

    bounds = torch.tensor(limits, device=pending.device)
    if sampling.temperature == 0.0:
        accepted, following = accept_greedy(drafts, logits.argmax(-1), bounds)
    else:
        target = probabilities(logits, sampling)
        uniforms = torch.ones(drafts.shape)
        for row, limit in enumerate(limits):  # drafts beyond the limit must not be accepted
            uniforms[row, :limit] = torch.rand(limit, generator=generators[row])
        proposed = target[:, :0] if chances is None else chances
        accepted, rest = accept_sampled(drafts, proposed, target, uniforms.to(pending.device), bounds)
        following = draw(rest, generators, active)

    agreed, drafted, last = accepted.tolist(), drafts.tolist(), following.tolist()
    emitted = [0] * len(active)
    for row, on in enumerate(active):
        for new in [*drafted[row][: agreed[row]], last[row]] if on else ():
            if not stopping.ended[row]:
                stopping.take_row(row, new)
                emitted[row] += 1
    # The cache keeps the pending token and the drafts up to a row's last new token, which is the next pending one.
    cache.take_back([steps + 1 - count for count in emitted])
    drafter.confirm(emitted)
    return following, Round(0.0, settled, limits, agreed, emitted)


def left_padding(starts: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    """Return the attention mask of a batch padded on the left, ``[B, width]``; None if no row has padding.

    Args:
        starts: column of the first real token of each row.
        width: number of columns.
        device: device of the mask.
    """
    if not any(starts):
        return None
    first = torch.tensor(starts, device=device)
    return (torch.arange(width, device=device)[None] >= first[:, None]).long()


def figures(rounds: Sequence[Round], row: int) -> dict[str, Any]:
    """Return the totals of one row over all rounds: rounds, drafts, accepted drafts and tokens.

    Args:
        rounds: the rounds of the batch.
        row: index of the row.

    Returns:
        A dict of numbers: ``rounds`` (those in which the row gained tokens), ``drafted`` (drafts that the row could
        accept), ``accepted`` (drafts that it accepted) and ``tokens`` (tokens that it gained). If an accepted draft
        ends the row, later drafts of that round do not count. The acceptance rate is ``accepted / drafted``; the paper
        divides by gamma x rounds instead.
    """
    mine = [r for r in rounds if r.emitted[row]]
    cut = [r.emitted[row] <= r.accepted[row] for r in mine]
    return {
        "rounds": len(mine),
        "drafted": sum(r.emitted[row] if c else r.drafted[row] for r, c in zip(mine, cut, strict=True)),
        "accepted": sum(r.emitted[row] if c else r.accepted[row] for r, c in zip(mine, cut, strict=True)),
        "tokens": sum(r.emitted[row] for r in mine),
    }


def token_seconds(rounds: Sequence[Round], row: int) -> list[float]:
    """Return the decoding time of each token of a row in seconds, estimated from the times of rounds.

    A round yields several tokens at once, so its time is divided among them. Tokens of the row's first round get the
    mean time per token of that round. All later tokens get the mean time per token of all later rounds. Therefore only
    the sum and the mean of the list are meaningful.

    Args:
        rounds: the rounds of the batch.
        row: index of the row.
    """
    mine = [r for r in rounds if r.emitted[row]]
    if not mine:
        return []
    first, rest = mine[0], mine[1:]
    later = sum(r.emitted[row] for r in rest)
    return [first.seconds / first.emitted[row]] * first.emitted[row] + (
        [sum(r.seconds for r in rest) / later] * later if later else []
    )
