"""Thresholds, shares and their edges."""

from kvbench.retrieval.chunks import by_rank, by_threshold, cut_chunks, shuffled


def test_thresholds_are_eq_2_and_3_and_strict_on_both_sides():
    widths = by_threshold([0.0, 0.59, 0.6, 0.61, 0.9, 0.91, 1.0], 0.6, 0.1)
    assert (widths.t_low, widths.t_high) == (0.6, 0.9)
    assert widths.bits == (2, 2, 4, 4, 4, 16, 16)


def test_edges_of_the_thresholds():
    assert by_threshold([0.4, 0.4, 0.4], 0.6, 0.1).bits == (4, 4, 4)
    assert by_threshold([0.4], 0.6, 0.1).bits == (4,)
    assert by_threshold([], 0.6, 0.1).bits == ()
    assert 16 not in by_threshold([0.1, 0.3, 0.7], 0.6, 0.0).bits  # beta = 0: no chunk is above its own maximum
    assert by_threshold([0.1, 0.3, 0.7], 0.0, 0.1).bits == (4, 4, 16)  # alpha = 0: nothing below the minimum
    assert by_threshold([-0.5, -0.2, -0.1], 0.6, 0.1).bits == (2, 4, 16)
    tiny = [0.1 + 1e-17 * i for i in range(3)]
    assert set(by_threshold(tiny, 0.6, 0.0).bits) <= {2, 4}


def test_shares_by_rank_round_and_leave_the_rest_to_int2():
    widths = by_rank([0.1, 0.9, 0.5, 0.7, 0.3, 0.2, 0.8, 0.4, 0.6, 0.0], [15, 35, 50])
    assert [widths.count(b) for b in (16, 4, 2)] == [2, 3, 5]
    assert widths.bits[1] == widths.bits[6] == 16
    assert by_rank([1.0, 1.0, 1.0], [1, 1, 1]).bits == (16, 4, 2)  # ties: the earlier chunk first
    assert by_rank([], [1, 1, 1]).bits == ()


def test_random_widths_keep_their_numbers():
    widths = by_threshold([i / 10 for i in range(11)], 0.6, 0.1)
    one, two = shuffled(widths, "a"), shuffled(widths, "b")
    assert sorted(one.bits) == sorted(widths.bits)
    assert one.bits != two.bits
    assert shuffled(widths, "a") == one


def test_chunks_leave_the_remainder_and_the_query_out():
    decode = lambda ids: ",".join(map(str, ids))  # noqa: E731
    chunked = cut_chunks(range(100), decode, 16, (10, 70), "what?")
    assert chunked.spans == [(10, 26), (26, 42), (42, 58)]
    assert chunked.texts[0] == decode(range(10, 26))
    assert (chunked.query, chunked.query_source) == ("what?", "input")
    assert cut_chunks(range(100), decode, 16, (10, 70)).query == decode(range(70, 100))
    free = cut_chunks(range(100), decode, 16)
    assert (free.query, free.query_source) == (decode(range(36, 100)), "last_64_tokens")
    assert free.spans == [(0, 16), (16, 32)]
