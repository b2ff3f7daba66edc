"""The Pareto front."""

from kvbench.results.ranking import front


def test_the_front_has_what_no_other_point_beats():
    points = [(3.0, 0.9), (1.0, 0.5), (2.0, 0.5), (2.0, 0.8), (4.0, 0.9), (1.0, 0.4)]
    assert front(points) == [1, 3, 0]
    assert front(points, higher=False) == [5]
    assert front([(1.0, 9.0), (2.0, 8.0), (3.0, 8.5)], higher=False) == [0, 1]
    assert front([]) == []


def test_of_equal_points_the_first_is_on_the_front():
    assert front([(1.0, 0.5), (1.0, 0.5), (0.5, 0.1)]) == [2, 0]
    assert front([(1.0, 0.5), (1.0, 0.7)]) == [1] and front([(1.0, 0.5), (1.0, 0.7)], higher=False) == [0]
