"""Acceptance leaves the target's distribution unchanged: a million draws, and a shift of 2% that shows."""

import torch

from kvbench.decoding.speculative import accept_greedy, accept_sampled

DRAWS, GAMMA, TOKENS = 1_000_000, 3, 5
#: chi-squared of 24 degrees of freedom exceeds this once in a million
LIMIT = 71.4


def chains() -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token distributions of draft and target after each token, ``[V, V]``; row 0 begins."""
    generator = torch.Generator().manual_seed(1)
    draft = torch.softmax(torch.randn(TOKENS, TOKENS, generator=generator), -1)
    target = torch.softmax(draft.log() + 0.7 * torch.randn(TOKENS, TOKENS, generator=generator), -1)
    target[2, 4] = 0.0  # a token that the target never takes, and one that the draft never proposes
    draft[3, 1] = 0.0
    return draft / draft.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)


def drawn(probs: torch.Tensor) -> torch.Tensor:
    """A token from each row of ``probs`` ``[n, V]``."""
    below = torch.rand(len(probs), 1) < probs.cumsum(-1)
    return below.long().argmax(-1)


def pairs(draft: torch.Tensor, target: torch.Tensor, draws: int, *, naive: bool = False) -> torch.Tensor:
    """Counts of the first two tokens ``[V, V]`` of `draws` rounds, completed by the target where one token came."""
    torch.manual_seed(0)
    previous, drafts = torch.zeros(draws, dtype=torch.long), []
    for _ in range(GAMMA):
        drafts.append(drawn(draft[previous]))
        previous = drafts[-1]
    context = torch.stack([torch.zeros_like(previous), *drafts], 1)
    tokens, p = torch.stack(drafts, 1), target[context]
    limits = torch.full((draws,), GAMMA)
    limits[::4] = 1  # rows whose budget is nearly spent
    accepted, rest = accept_sampled(tokens, draft[context[:, :GAMMA]], p, torch.rand(draws, GAMMA), limits)
    if naive:  # the mistake of drawing from p after a rejection
        rest = p[torch.arange(draws), accepted]
    following = drawn(rest)
    first = torch.where(accepted > 0, tokens[:, 0], following)
    second = torch.where(accepted > 1, tokens[:, 1], torch.where(accepted == 1, following, -1))
    missing = second < 0
    second[missing] = drawn(target[first[missing]])
    return torch.bincount(first * TOKENS + second, minlength=TOKENS**2).view(TOKENS, TOKENS)


def chi_squared(counts: torch.Tensor, target: torch.Tensor) -> float:
    expected = counts.sum() * target[0][:, None] * target
    possible = expected > 0
    assert not counts[~possible].any()
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def test_a_million_sampled_rounds_are_distributed_as_the_target():
    draft, target = chains()
    assert chi_squared(pairs(draft, target, DRAWS), target) < LIMIT
    shifted = target.clone()
    shifted[0, 0] += 0.02
    shifted[0, 1] -= 0.02
    assert chi_squared(pairs(draft, shifted, DRAWS // 5), target) > 5 * LIMIT
    assert chi_squared(pairs(draft, target, DRAWS // 5, naive=True), target) > 5 * LIMIT


def test_a_draft_equal_to_the_target_is_always_accepted():
    _, target = chains()
    probs = target[torch.randint(TOKENS, (1000, GAMMA + 1))]
    drafts = torch.stack([drawn(probs[:, i]) for i in range(GAMMA)], 1)
    uniforms = torch.rand(1000, GAMMA)
    accepted, rest = accept_sampled(drafts, probs[:, :GAMMA], probs, uniforms, torch.full((1000,), GAMMA))
    assert (accepted == GAMMA).all()
    assert torch.equal(rest, probs[:, GAMMA])


def test_greedy_takes_the_longest_prefix_within_each_rows_limit():
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3], [1, 2, 3]])
    choices = torch.tensor([[1, 2, 3, 4]] * 5)
    accepted, following = accept_greedy(drafts, choices, torch.tensor([3, 3, 3, 1, 0]))
    assert accepted.tolist() == [3, 1, 0, 1, 0]
    assert following.tolist() == [4, 2, 1, 2, 1]


def test_a_draft_is_accepted_with_probability_p_over_q_and_never_where_p_is_0():
    """One draft of q = .5: accepted below u = p / q, not at it; a draw of exactly 0 accepts nothing impossible."""
    drafts, draft_probs = torch.zeros(6, 1, dtype=torch.long), torch.tensor([0.5, 0.5, 0.0]).expand(6, 1, 3)
    target = torch.tensor([[0.25, 0.25, 0.5]] * 4 + [[0.0, 0.25, 0.75]] * 2)[:, None].expand(6, 2, 3)
    uniforms = torch.tensor([0.0, 0.4375, 0.5, 0.9375, 0.0, 0.5])[:, None]
    accepted, rest = accept_sampled(drafts, draft_probs, target, uniforms, torch.ones(6, dtype=torch.long))
    assert accepted.tolist() == [1, 1, 0, 0, 0, 0]
    # after a rejection: norm(max(p - q, 0)); after an acceptance: p of the next place
    expected = [[0.25, 0.25, 0.5]] * 2 + [[0.0, 0.0, 1.0]] * 4
    assert rest.tolist() == expected


def test_a_rejection_that_only_rounding_caused_draws_from_the_target():
    """The draft's probabilities are nowhere below the target's: nothing is left to draw from."""
    target = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]])
    draft = torch.tensor([[[0.5625, 0.5]]])  # as if its sum had been rounded
    accepted, rest = accept_sampled(
        torch.tensor([[0]]), draft, target, torch.tensor([[0.9375]]), torch.ones(1, dtype=torch.long)
    )
    assert accepted.tolist() == [0] and rest.tolist() == [[0.5, 0.5]]
