"""What stands for an empty query."""

from __future__ import annotations

from kvbench.retrieval.chunks import cut_chunks


def decode(ids):
    return "".join(chr(97 + i) for i in ids)


def test_the_query_and_where_it_came_from():
    ids = list(range(20))
    given = cut_chunks(ids, decode, 4, (2, 13), "why?", "last_chunk")
    assert (given.query, given.query_source) == ("why?", "input")
    template = cut_chunks(ids, decode, 4, (2, 13), " ")
    assert (template.query, template.query_source) == (decode(ids[13:]), "template")
    last = cut_chunks(ids, decode, 4, (2, 13), "", "last_chunk")
    assert (last.query, last.query_source) == (decode(ids[9:13]), "last_chunk")
    assert last.spans == [(2, 6), (6, 10)]
    short = cut_chunks(ids, decode, 16, (2, 13), "", "last_chunk")
    assert (short.query, short.texts) == (decode(ids[2:13]), ())
    nothing = cut_chunks(list(range(20)) * 5, decode, 4)
    assert nothing.query_source == "last_64_tokens"


def pieces(ids):
    """A tokenizer of pieces with their spaces; like sentencepiece, it drops the space in front of what it decodes."""
    return "".join(ids).removeprefix(" ")


def test_words_that_a_border_cuts_are_whole_for_the_encoder_in_both_chunks():
    ids = [" say", " amb", "er", ":", "12", " now", "\n", "go", " on", " by", "e", " question"]
    plain = cut_chunks(ids, pieces, 2, (1, 11))
    assert plain.texts == ("amber", ":12", "now\n", "go on", "bye")
    words = cut_chunks(ids, pieces, 2, (1, 11), whole_words=True)
    assert words.texts == ("amber:12", "amber:12", " now\n", "go on", " bye")
    assert words.spans == plain.spans
    assert cut_chunks(ids, pieces, 3, (1, 11), whole_words=True).texts == ("amber:12", "amber:12 now\n", "go on bye")
    # nothing is taken from beyond the context, and a word that does not end within reach stays cut
    assert cut_chunks(ids, pieces, 2, (2, 10), whole_words=True).texts == ("er:12", "er:12 now", "\ngo", " on by")
    blob = cut_chunks(["x"] * 100, pieces, 32, (0, 74), whole_words=True)
    assert [len(text) for text in blob.texts] == [32, 42]


def test_text_that_does_not_decode_alone_is_left_as_it_is():
    letters = {0: "ab ", 1: "?", 2: "?", 3: " cd"}

    def decode(ids):
        return "".join(letters[i] for i in ids).replace("??", "é")

    ids = [0, 1, 2, 3]  # é in two tokens: the first chunk ends, the second begins with half of it
    assert cut_chunks(ids, decode, 2, (0, 4), whole_words=True).texts == ("ab ?", "? cd")
