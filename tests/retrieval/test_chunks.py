"""What stands for an empty query."""

from __future__ import annotations

from kvbench.retrieval.chunks import cut


def decode(ids):
    return "".join(chr(97 + i) for i in ids)


def test_the_query_and_where_it_came_from():
    ids = list(range(20))
    given = cut(ids, decode, 4, (2, 13), "why?", "last_chunk")
    assert (given.query, given.query_source) == ("why?", "input")
    template = cut(ids, decode, 4, (2, 13), " ")
    assert (template.query, template.query_source) == (decode(ids[13:]), "template")
    last = cut(ids, decode, 4, (2, 13), "", "last_chunk")
    assert (last.query, last.query_source) == (decode(ids[9:13]), "last_chunk")
    assert last.spans == [(2, 6), (6, 10)]
    short = cut(ids, decode, 16, (2, 13), "", "last_chunk")
    assert (short.query, short.texts) == (decode(ids[2:13]), ())
    nothing = cut(list(range(20)) * 5, decode, 4)
    assert nothing.query_source == "last_64_tokens"
