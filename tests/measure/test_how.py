"""Settings of a measurement."""

from kvbench.measure.how import How


def test_every_row_draws_with_a_seed_of_its_own() -> None:
    sampling = How(new_tokens=4, temperature=0.75, top_p=0.5, seed=7).sampling(3)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.75, 0.5, [7, 8, 9])
