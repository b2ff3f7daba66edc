"""The group size that fits a head."""

import pytest

from kvbench.quantizers.spec import fitting


@pytest.mark.parametrize(
    ("most", "head_dim", "group"),
    [
        (64, 128, 64),
        (64, 80, 16),
        (64, 96, 32),
        (48, 96, 32),  # a power of two
        (128, 64, 64),
        (32, 40, 8),
        (64, 72, 8),
        (8, 128, 8),
        (64, 36, None),
        (4, 128, None),
    ],
)
def test_a_group_is_the_largest_power_of_two_that_divides_the_head_and_8_is_the_least(most, head_dim, group) -> None:
    assert fitting(most, head_dim) == group
